"""What tokens are drawn from, for an engine or a trainer that reads it: laws of rows, and logits after edits."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from compiled_sampler.engine.boundary.tensors import RowFormat
from compiled_sampler.engine.drawing import Drawer
from compiled_sampler.engine.plans.plan import Plan
from compiled_sampler.engine.plans.planner import Planner
from compiled_sampler.engine.preparation import Preparation
from compiled_sampler.engine.steps.step_runner import StepRunner


class Distributions(Preparation):
    """Computes what a sampler draws from; ``Sampler`` adds the steps that draw.

    Args:
        planner: holds requests and plans batches of them.
        runner: of the steps.
        drawer: does the work.
        logits: the format of the sampler's logits.
    """

    def __init__(self, planner: Planner, runner: StepRunner, drawer: Drawer, logits: RowFormat) -> None:
        """Compute nothing."""
        super().__init__(planner, runner, logits)
        self._drawer = drawer

    def probs(
        self,
        plan: Plan,
        logits: Tensor,
        out: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        token_bitmask: Tensor | None = None,
        edit_inputs: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """The distribution that each row's token is drawn from: float32 ``[R, V]``, exact zeros where filters drop one.

        It is uniform over equal logits of any size, where ``sample`` rounds its noise, see there. With drafts it is the
        law of the target, which ``verify`` keeps under every rule: of row j of a request, after its first j drafts.

        Args:
            plan: from ``plan``, with or without drafts.
            logits: ``[R, >= V]`` of the sampler's dtype, R = ``plan.num_rows``; the rows of ``verify`` with drafts.
            out: float32 ``[R, V]`` that takes the result.
            positions: as in ``sample``, with drafts as in ``verify``; needed for penalties, DRY, bad words, watermarks,
                ``min_tokens``, XTC and the user's edits. Drafts must be in the history by then: ``draft``, ``verify``
                or ``set_history`` write it.
            token_bitmask: as in ``sample``, one row for each row of logits.
            edit_inputs: as in ``sample``, one row for each row of logits.

        Returns:
            ``out`` or a new tensor; rows sum to 1 within 1e-6, but to 0 for padding, where all tokens are masked, and
            for requests that are not covered (``RowStatus.NOT_COVERED``).

        Raises:
            RuntimeError, TypeError, ValueError: as ``sample``.
        """
        self._planner.check_current(plan)
        return self._drawer.probs(plan, logits, out, positions, (token_bitmask, edit_inputs))

    def edited_logits(
        self,
        plan: Plan,
        logits: Tensor,
        positions: Tensor,
        *,
        token_bitmask: Tensor | None = None,
        edit_inputs: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """The logits that every filter and draw reads, after the edits of each request: float32 ``[R, V]``.

        Of the logits that were sampled they are the first argument of ``replay``. With drafts they are the rows of
        ``verify``; the drafts must be in the history, as for ``probs``. ``verify`` and ``sample`` write the tokens that
        they emit; what is behind a row's own position does not count, so that logits may be edited again after the
        step.

        Args:
            plan: from ``plan``, with or without drafts.
            logits: as in ``probs``.
            positions: as in ``sample``, with drafts as in ``verify``.
            token_bitmask: as in ``sample``, one row for each row of logits.
            edit_inputs: as in ``sample``, one row for each row of logits.

        Raises:
            RuntimeError, TypeError, ValueError: as ``sample``.
        """
        self._planner.check_current(plan)
        return self._drawer.edited_logits(plan, logits, positions, (token_bitmask, edit_inputs))
