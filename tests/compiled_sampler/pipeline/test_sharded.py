"""Rows whose columns are split over gloo processes: the results of whole rows on every rank, and what is refused."""

import pytest
import torch

from compiled_sampler import Sampler, VocabularyShard
from tests.builders import rank_logprobs, ranks

F32, BF16 = torch.float32, torch.bfloat16


def test_three_ranks_return_what_one_does():
    """Of 1,000 rows in all; a rank has a single token, nothing or padding alone; the last one columns of padding."""
    sizes = (1, 140, 187)
    ranks.asked(
        3,
        (ranks.every_mode, 300, sizes, 24, (F32, BF16)),
        (ranks.every_mode, 300, (0, 300, 100), 14, (BF16,)),
        (ranks.counts_alone, 300, sizes),
        (rank_logprobs.every_law, 300, sizes),
        (rank_logprobs.logprobs_of_columns, 1100, (1, 699, 500)),  # that begin within a block of the law
        (rank_logprobs.logprobs_of_columns, 40, (30, 0, 40)),
        (ranks.every_rule, 300, sizes),
        (ranks.trees, 129, (60, 0, 69)),
        (ranks.every_edit, 129, (60, 0, 75)),
        (ranks.edits_of_the_user, (60, 0, 69)),
        (rank_logprobs.a_replay, 300, sizes),
    )


def test_two_ranks_agree_or_are_told_that_they_do_not():
    ranks.asked(
        2,
        (ranks.a_difference_is_seen,),
        (ranks.disagreeing_plans,),
        (ranks.seeds_of_none,),
        (ranks.wrong_shards,),
        (ranks.every_edit, 300, (97, 203)),
        (ranks.masks_that_might_be_either,),
        (rank_logprobs.a_loss_of_torch, 300, (150, 150)),
        (ranks.every_mode, 40, (25, 15), 14, (F32,)),  # fewer tokens than candidates
        (ranks.counts_alone, 1400, (1100, 300)),  # of several blocks
        (rank_logprobs.logprobs_of_columns, 1400, (700, 700)),
        (ranks.collectives_as_counted, 2000, (1000, 1000)),
    )


def test_one_rank_returns_what_whole_rows_do():
    ranks.asked(
        1,
        (ranks.every_mode, 300, (310,), 14, (BF16,)),
        (rank_logprobs.a_replay, 300, (310,)),
        (ranks.every_edit, 300, (300,)),
    )


@pytest.mark.full
def test_four_ranks_return_what_one_does():
    """The last has padding alone, the second nothing, or a single token."""
    nothing, single = (70, 0, 230, 100), (70, 1, 229, 100)
    ranks.asked(
        4,
        (ranks.every_mode, 300, nothing, 14, (BF16,)),
        (ranks.every_rule, 300, single),
        (ranks.every_edit, 300, single),
        (rank_logprobs.a_replay, 300, nothing),
    )


@pytest.mark.parametrize("seconds", [0.0, 9.0])
def test_a_rank_that_leaves_or_hangs_is_an_error_of_the_others(seconds):
    ranks.asked(2, (ranks.a_rank_that_leaves, seconds), timeout_s=4)


@pytest.mark.full
def test_a_search_without_logits_is_compiled():
    ranks.asked(1, (ranks.compiled_counts, 3000), timeout_s=900)


@pytest.mark.full
def test_logprobs_of_columns_are_compiled():
    ranks.asked(2, (rank_logprobs.compiled_logprobs, 1100, (700, 400)), timeout_s=900)


def test_a_shard_needs_a_process_group():
    with pytest.raises(ValueError, match="init_process_group"):
        VocabularyShard(0, 5)
    with pytest.raises(TypeError, match="shard must be a VocabularyShard"):
        Sampler(5, 1, shard=(0, 5))
    with pytest.raises(ValueError, match="check_plans must be False without a shard"):
        Sampler(5, 1, check_plans=True)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus_replay_what_one_draws():
    """It compiles for a minute or more; ``pytest -s`` shows what each rank does."""
    ranks.asked(2, (ranks.captured, 5000, (2000, 3000)), timeout_s=900, backend="nccl")
