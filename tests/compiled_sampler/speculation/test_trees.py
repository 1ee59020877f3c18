"""Trees of drafts: depths and paths of nodes, whatever parents are."""

import random

import pytest
import torch

from compiled_sampler.speculation.trees import first_ways, tree_of
from tests.builders.trees import path_of, random_parents


@pytest.mark.parametrize("kind", ["random", "chain", "garbage"])
@pytest.mark.parametrize("width", [1, 8, 9, 64])
def test_nodes_have_the_depth_and_the_path_of_a_climb(kind, width):
    source = random.Random(width)
    trees = [random_parents(source, width, kind) for _ in range(20)]
    counts = [source.randrange(width + 1) for _ in trees]
    parents, num_drafts = torch.tensor(trees), torch.tensor(counts)
    made = tree_of(first_ways(parents, num_drafts), parents, num_drafts)
    for n, (tree, count) in enumerate(zip(trees, counts, strict=True)):
        for node in range(width):
            path = path_of(tree, node) if node < count else None
            assert made.depths[n, node] == len(path or ())
            if path is not None:
                assert int(made.paths[n, node]) % 2**64 == sum(1 << each for each in path)
        assert made.is_wrong[n] == any(not -1 <= tree[node] < node for node in range(count))
