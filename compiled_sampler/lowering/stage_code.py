"""The compiled code of a stage: for which tensors it is made, where it is kept on disk, and with which options."""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map_only

from compiled_sampler.exact.triton import LOCK, launch_class
from compiled_sampler.logit_edit import CustomEdits
from compiled_sampler.lowering.inductor.compilation import Compiled, Options, compiled
from compiled_sampler.lowering.inductor.disk_cache import claimed, load, path_of, store
from compiled_sampler.lowering.inductor.patches import tuned_kernels
from compiled_sampler.lowering.inductor.versions import is_known
from compiled_sampler.lowering.layouts import (
    TABLES,
    TensorSpec,
    copies,
    is_far,
    layout,
    leaves,
    table_layouts,
    unshared,
)
from compiled_sampler.lowering.tuning import Stage, is_hand_written, tuning_of
from compiled_sampler.pipeline.schedule import is_gpu

EXACT_OPTIONS: Options = {
    "emulate_precision_casts": True,  # turns FMA contraction off in Triton; C++ has it off already
    "pattern_matcher": False,  # else y = x * t; y - y.amax() becomes (x - amax) * t
    "constant_and_index_propagation": False,  # else int64 arange arithmetic runs in int32
    "eager_numerics.disable_ftz": True,
    "eager_numerics.division_rounding": True,
    "realize_opcount_threshold": 30,  # more lets Inductor trace shared subexpressions again for every use
    "realize_reads_threshold": 32,
    "split_reductions": False,  # rows are cut into blocks by hand; a short reduction split again is a kernel more
    "score_fusion_memory_threshold": 1,  # else the outputs of one row, a few bytes each, become a kernel each
}
"""Inductor options that keep compiled equal to eager. Results are integers, so tuning choices are left free."""


class StageCode(NamedTuple):
    """The compiled code that a call of a stage needs: what it depends on, where it is kept, and how it is made."""

    stage: Stage
    tensors: tuple[Any, ...]
    """Tensors, None and nested tuples of them; of a call that is over, a ``TensorSpec`` in place of each tensor."""
    static: dict[str, Any]
    hint: int  # rows for which Inductor tunes
    device: torch.device
    key: tuple[Any, ...]  # stage, device, static arguments, class of row counts and layouts of the tensors

    @classmethod
    def of(cls, stage: Stage, tensors: tuple[Any, ...], static: dict[str, Any]) -> StageCode:
        """The code for a stage with such tensors."""
        given = list(leaves(tensors))
        present = [leaf for leaf in given if leaf is not None]
        device, rows = present[0].device, max(leaf.shape[0] for leaf in present)
        far = any(map(is_far, present))
        hint = rows if far else tuning_of(stage).rows_hint(rows, device, static.get("block", 0))
        classes = far or hint, *(launch_class(rows) if is_hand_written(stage) else ())
        key = stage, device, *static.items(), *classes, *map(layout, given), *table_layouts(tensors)
        return cls(stage, tensors, static, hint, device, key)

    def portable(self) -> StageCode:
        """The same for another process, or for after the call: without tensors."""
        return self._replace(tensors=tree_map_only(torch.Tensor, TensorSpec.of, self.tensors))

    def without_numbers(self) -> StageCode:
        """The same without the memory of any tensor but those in tables, which a sampler holds anyway."""
        specs = tree_map_only(torch.Tensor, TensorSpec.of, self.tensors, lambda value: isinstance(value, TABLES))
        return self._replace(tensors=specs)

    def made_tensors(self) -> tuple[Any, ...]:
        """The tensors, with no memory behind those of which there were specs."""
        tensors: tuple[Any, ...] = tree_map_only(TensorSpec, TensorSpec.made, self.tensors)
        return tensors

    def path(self, exact: Options) -> Path | None:
        """Where the compiled stage is kept; None where Triton keeps it, or torch: edits of a user may use any code."""
        # Torch does so by a hash of the graph that was traced and of its constants.
        if is_hand_written(self.stage) or any(isinstance(each, CustomEdits) for each in self.static.values()):
            return None
        return path_of(self.stage, self.device, self._options(exact), *self.key[2:])

    def check_not_capturing(self) -> None:
        """Refuse to compile within a capture, which compilation would break."""
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"stage {self.stage.__name__} was not compiled for such a call before the capture; warmup() does so "
                "for what Sampler(verifications=, probabilities=, captured_edits=, captured_logprobs=) names, for as "
                "many rows as one of its buckets= has, and for logits of other strides if bind(logits=) has them. Any "
                "other call is made once before, and once more after warmup()"
            )

    def is_on_disk(self, exact: Options) -> bool:
        """Whether the stage is there, or is one that is never kept."""
        with suppress(OSError):  # a file system that fails for a moment
            path = self.path(exact)
            return path is None or path.exists()
        return False

    def found_or_compiled(self, exact: Options) -> Compiled:
        """The stage from disk, after another process that compiles it, or compiled now and kept there."""
        path = self.path(exact)
        found = self.found(path)
        if found is not None:
            return found
        with LOCK, claimed(path):
            found = self.found(path)  # by whom the claim was waited for
            if found is not None:
                return found
            made = self.compiled(exact)
            if path is not None and load(path, self._scope) is None:  # else one for other numbers of rows lies there
                store(path, made)
        return made

    def found(self, path: Path | None) -> Compiled | None:
        """What is on disk, if it serves such tensors."""
        found = None if path is None else load(path, self._scope)
        return found if found is None or found.serves(*self.made_tensors()) else None

    def compiled(self, exact: Options) -> Compiled:
        """The stage compiled for such tensors; one with kernels of its own, which Triton keeps, after a launch."""
        tuning, tensors, on_gpu = tuning_of(self.stage), self.made_tensors(), is_gpu(self.device)
        if is_hand_written(self.stage):
            self.stage(*tree_map_only(torch.Tensor, torch.zeros_like, tensors), **self.static)
            return self.hand_written()
        if tuning.writes:
            # on an unknown torch the stage runs on them
            tensors = unshared(tensors, are_read=False) if is_known() else unshared(copies(tensors), are_read=True)
        with tuned_kernels(tuning, self.hint, self.static.get("block", 0), on_gpu=on_gpu):
            return compiled(_specialised(self.stage, self.static), tensors, self.hint, self._options(exact))

    def hand_written(self) -> Compiled:
        """The stage itself, whose kernels serve every number of rows of this key."""
        return Compiled(functools.partial(self.stage, **self.static))

    def _options(self, exact: Options) -> Options:
        """Inductor's options: what keeps its results exact, and the tuning of the stage."""
        on_gpu, block = is_gpu(self.device), self.static.get("block", 0)
        return {**exact, **tuning_of(self.stage).options(self.hint, block, on_gpu=on_gpu)}

    @property
    def _scope(self) -> dict[str, Any]:
        """The names of the stage's module."""
        function: Any = self.stage
        found: dict[str, Any] = function.__globals__
        return found


def fault_of(error: Exception) -> str:
    """Why a stage runs in eager torch that does not compile."""
    return f"it fails with {type(error).__name__}: {error}".split("\n")[0]


def _specialised(stage: Any, static: dict[str, Any]) -> Callable[..., Any]:
    """A copy of a stage with its static arguments as defaults and code of its own, so that Dynamo caches it apart."""
    label = "_".join((stage.__name__, *(f"{value}" for value in static.values())))
    code = stage.__code__.replace(co_name=re.sub(r"\W", "_", label))
    copy = types.FunctionType(code, stage.__globals__, code.co_name, stage.__defaults__, stage.__closure__)
    copy.__kwdefaults__ = {**(stage.__kwdefaults__ or {}), **static}
    copy.__wrapped__ = stage  # type: ignore[attr-defined]
    return copy
