"""An edit of the user: classifier-free guidance (Sanchez et al., 2306.17806) of two rows of the model.

python examples/guidance.py

The engine runs the model on each text twice, with the prompt and without. The rows with the prompt are those of the
sampler; those without come as a tensor of the call.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from compiled_sampler import EditInput, EditRows, LogitEdit, Sampler, SamplingParams

VOCAB_SIZE = 1000


@dataclass(frozen=True)
class GuidanceParams:
    """What a request sets."""

    scale: float = 1.5


@dataclass(frozen=True)
class Guidance(LogitEdit):
    """Moves logits away from those that the model has without the prompt; a token that is masked stays so."""

    params = GuidanceParams
    inputs: ClassVar[Mapping[str, EditInput]] = {"unprompted": EditInput(torch.float32, per_token=True)}

    def edit(self, x: Tensor, ids: Tensor, rows: EditRows) -> Tensor:
        """``u + scale * (x - u)``, each operation rounded once."""
        unprompted = rows.inputs["unprompted"]
        guided = unprompted + rows.params["scale"] * (x - unprompted)
        return torch.where(x > float("-inf"), guided, x)


def main() -> None:
    """Draw with guidance, and compare with logits that were guided before."""
    sampler = Sampler(VOCAB_SIZE, 2, backend="eager", edits=[Guidance()])
    guided = sampler.add_request(SamplingParams(top_p=0.9, seed=1, extra_args={"Guidance": {"scale": 3.0}}))
    plain = sampler.add_request(SamplingParams(top_p=0.9, seed=1))
    prompted, unprompted = 2.0 * torch.randn(2, 1, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    position = torch.tensor([5])
    drawn = sampler.sample(sampler.plan([guided]), prompted, position, edit_inputs={"unprompted": unprompted})
    before = unprompted + 3.0 * (prompted - unprompted)
    wanted = sampler.sample(sampler.plan([plain]), before, position)
    print(
        f"token {drawn.tolist()[0]}, {'the same' if drawn.tolist() == wanted.tolist() else 'another'} from such logits"
    )


if __name__ == "__main__":
    main()
