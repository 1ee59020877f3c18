"""The model runner of continuous batching with another draw."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.generation.continuous_batching.model_runner import ModelRunner

from compiled_sampler.functional import probs, sample
from compiled_sampler.integrations.transformers.continuous_batching.processors import SeededProcessors

_ROWS_OUT_OF_RANGE = "each row of logits must have a token to draw, got one whose tokens are all masked"


class SeededRunner(ModelRunner):  # type: ignore[misc]
    """Draws the tokens of a forward pass from logits, parameters, seeds and positions alone."""

    def __init__(self, logit_processor: Any, cb_config: Any, *, backend: str, **others: Any) -> None:
        if not isinstance(logit_processor, SeededProcessors):
            raise RuntimeError("the manager must be made after install(), got one from before; make it anew")
        for name in ("varlen_compile_config", "decode_compile_config"):
            if getattr(cb_config, name, None) is not None:
                raise ValueError(f"{name} must be None, got a CompileConfig; the sampler compiles its stages itself")
        super().__init__(logit_processor=logit_processor, cb_config=cb_config, **others)
        self._backend, self._batch_data = backend, dict[str, Any]()
        # transformers has seeded the generator, alike on every rank.
        logit_processor.salt = int(torch.randint(2**62, ()))

    def _forward_process_and_sample(self, model: Any, batch_data: dict[str, Any], *outputs: Tensor) -> None:
        """As in ``ModelRunner``; ``_sample`` reads the batch."""
        self._batch_data = batch_data
        super()._forward_process_and_sample(model, batch_data, *outputs)

    def _sample(self, scores: Tensor, output_ids: Tensor) -> None:
        """Write the tokens of logits float32 ``[1, N, V]``, and the bits of their logprobs where they are wanted."""
        # A graph of transformers captures this with the forward pass: on CUDA it waits for nothing, and each replay
        # reads its tensors.
        logits, data = scores[0], self._batch_data
        seeds, parameters = self.logit_processor.numbers(data["logits_processor_args"], len(logits))
        if not self.do_sample:
            parameters["temperature"] = 0.0
        positions = drawn_positions(data)
        token_ids = sample(logits, seeds=seeds, positions=positions, backend=self._backend, **parameters).token_ids
        # On CUDA the embedding of -1 ends the process.
        if token_ids.device.type == "cpu" and bool((token_ids < 0).any()):
            raise RuntimeError(_ROWS_OUT_OF_RANGE)
        output_ids[0, : len(logits)].copy_(token_ids)
        if self.return_logprobs:
            law = probs(logits, backend=self._backend, **parameters)
            is_token = token_ids >= 0  # rows that pad a graph's batch may have none
            found = law.gather(1, token_ids.clamp(min=0)[:, None])[:, 0].log()
            logprobs = torch.where(is_token, found, float("-inf"))
            output_ids[1, : len(logits)].copy_(logprobs.view(torch.int32))


def drawn_positions(batch_data: dict[str, Any]) -> Tensor:
    """The position of the token that each row of logits draws, int64 ``[N]``."""
    # Here alone positions of input tokens become those of drawn ones.
    positions: Tensor = batch_data["position_ids"][0, batch_data["logits_indices"]]
    return positions.to(torch.int64) + 1
