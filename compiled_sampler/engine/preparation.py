"""What an engine calls before it serves: warm-up, captures, bound buffers, and the counts of all of them."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor

from compiled_sampler.engine.boundary import arguments
from compiled_sampler.engine.boundary.tensors import RowFormat, check_logits_buffer
from compiled_sampler.engine.plans.planner import Planner
from compiled_sampler.engine.request_holder import RequestHolder
from compiled_sampler.engine.statistics import SamplerStatistics
from compiled_sampler.engine.steps.step_runner import StepRunner
from compiled_sampler.lowering.compiled_stages import Progress


class Preparation(RequestHolder):
    """Compiles and captures the steps of a sampler, whose requests it holds.

    Args:
        planner: holds requests and plans batches of them.
        runner: of the steps.
        logits: the format of the sampler's logits.
    """

    def __init__(self, planner: Planner, runner: StepRunner, logits: RowFormat) -> None:
        """Compile and capture nothing."""
        super().__init__(planner)
        self._runner, self._logits = runner, logits

    def warmup(self, progress: Progress | None = None, modes: Collection[str] | None = None) -> None:
        """Compile and capture every step that the sampler was made for.

        Later calls of up to ``max_num_requests`` rows, of verifications as many requests, never compile.

        Args:
            progress: called as ``progress(done, total, label)`` for each step traced or compiled, then each capture.
            modes: names of the modes to prepare, None for all. A batch of another mode is served by a captured variant
                of a mode that covers it, if there is one.

        Raises:
            TypeError, ValueError: ``progress`` that cannot be called; a name that is no mode.
            graph_cache.CaptureError: a capture failed; the sampler stays usable, and a later warmup tries again.
            RuntimeError: the current stream is being captured.
        """
        arguments.check_progress(progress)
        self._runner.warmup(progress, modes)

    def capture_seen(self, progress: Progress | None = None) -> int:
        """The number of variants captured for tensors that came back in calls, which they read and write in place.

        An engine mostly brings logits, positions and ``out`` at the same addresses. What came back at least twice since
        the last call is captured by this method and by ``warmup``, never inside a step. Such calls then copy nothing. A
        capture that fails is left out with a warning, and its calls are served as before.

        Args:
            progress: called as ``progress(done, total, label)`` after each capture.

        Raises:
            TypeError: ``progress`` that cannot be called.
            RuntimeError: the current stream is being captured.
        """
        arguments.check_progress(progress)
        return self._runner.capture_seen(progress)

    def bind_logits(self, buffer: Tensor | None) -> None:
        """Let variants that ``warmup`` captures from now on read the engine's own logits buffer in place.

        Args:
            buffer: ``[>= 1, >= V]``, whose first R rows are then passed to ``sample`` or ``verify``; None drops it.

        Raises:
            TypeError, ValueError: a wrong dtype, shape or device.
        """
        check_logits_buffer(buffer, self._logits)
        self._runner.bind_logits(buffer)

    def statistics(self) -> SamplerStatistics:
        """The counts of captures, replays and fallbacks, the bytes that are held, and the stages that run eager."""
        return self._runner.statistics()
