"""``generate_batch`` of transformers with a seed for each prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers.generation.continuous_batching.utils import WorkloadHints

from compiled_sampler.integrations.transformers.continuous_batching.installing import installed
from compiled_sampler.params import SamplingParams

_WAIT = 1.0  # seconds between two looks at whether the thread that decodes still runs


def generate_batch(
    model: Any,
    inputs: Sequence[Sequence[int]],
    seeds: Sequence[int],
    generation_config: Any = None,
    continuous_batching_config: Any = None,
    max_new_tokens: int | None = None,
    backend: str = "auto",
) -> list[Any]:
    """Decode prompts with continuous batching, each to the tokens that its logits, parameters and seed give.

    Args:
        model: a decoder with ``ContinuousMixin``.
        inputs: token ids of each prompt.
        seeds: one for each, in [-2**63, 2**64).
        generation_config: of transformers; without one the model's. Its ``num_return_sequences`` must be 1.
        continuous_batching_config: of transformers.
        max_new_tokens: of every request; without it the config's.
        backend: of ``compiled_sampler.functional.sample``.

    Returns:
        A ``GenerationOutput`` for each prompt, in their order.

    Raises:
        RuntimeError: a request failed.
        ValueError: a wrong number of seeds, several sequences for a prompt, or a field of the config that continuous
            batching cannot honour, also where transformers would pass over it.
    """
    config = generation_config or model.generation_config
    _check(config, len(inputs), len(seeds))
    if not inputs:
        return []
    most = config.max_new_tokens if max_new_tokens is None else max_new_tokens
    hints = WorkloadHints(max(map(len, inputs)), most or 0, len(inputs))
    given = {"continuous_batching_config": continuous_batching_config, "workload_hints": hints}
    with installed(backend), model.continuous_batching_context_manager(config, timeout=5, **given) as manager:
        names = [
            manager.add_request(list(each), max_new_tokens=most, eos_token_id=_eos(model, config), seed=seed)
            for each, seed in zip(inputs, seeds, strict=True)
        ]
        return _collected(manager, names)


def _check(config: Any, num_prompts: int, num_seeds: int) -> None:
    if num_seeds != num_prompts:
        raise ValueError(f"seeds must be one for each of the {num_prompts} prompts, got {num_seeds}")
    if (config.num_return_sequences or 1) != 1:
        raise ValueError(
            f"num_return_sequences must be 1, got {config.num_return_sequences}; give a prompt once for each seed"
        )
    edits = set(SamplingParams.from_generation_config(config, prompt_len=1).edits) - {"stops"}
    if edits:
        raise ValueError(
            f"the generation config must ask for no edits in continuous batching, got {', '.join(sorted(edits))}; "
            "leave its fields out, or call generate(custom_generate=sample)"
        )


def _eos(model: Any, config: Any) -> Any:
    """The eos ids that ``add_requests`` of transformers would take: of the config, of the model, or none."""
    found = config.eos_token_id
    found = model.config.eos_token_id if found is None else found
    return -1 if found is None else found


def _collected(manager: Any, names: list[str]) -> list[Any]:
    """The outputs of requests, in the order of their names."""
    found: dict[str, Any] = {}
    while len(found) < len(names):
        output = manager.get_result(timeout=_WAIT)
        if output is None and not manager.is_running():
            raise RuntimeError(
                f"continuous batching ended with {len(found)} of {len(names)} requests done; see its log"
            )
        if output is not None and output.error is not None:
            raise RuntimeError(f"request {output.request_id} failed: {output.error}")
        if output is not None and output.is_finished():
            found[output.request_id] = output
    return [found[name] for name in names]
