"""What an engine holds: requests in slots, plans, and steps that draw tokens and verify drafts."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor

from compiled_sampler.batch import ProbabilityOutputs, SampleOutputs, VerifyOutputs
from compiled_sampler.engine.draft_handles import (
    Draft,
    in_dtype,
    opened,
    proposal_kinds,
    proposals_of,
    verification_tensors,
)
from compiled_sampler.engine.outputs import copied, no_drafts, no_tokens
from compiled_sampler.engine.plan import Plan
from compiled_sampler.engine.planner import Planner
from compiled_sampler.engine.step_runner import Progress, Runner, Step
from compiled_sampler.engine.validation import (
    check_draft,
    check_drafts,
    check_logits,
    check_outputs,
    check_positions,
    check_rule,
    check_sampler,
    check_sort,
    checked_verifications,
)
from compiled_sampler.modes import MOST_DRAFTS, Mode, Verification, mode_table, probabilities_mode
from graph_cache import BucketLadder, CacheStatistics


class Sampler(Planner):
    """Turns logits into tokens: seeded, exact, the same bits on every backend and in every batch.

    Args:
        vocab_size: V, the true vocabulary; logits may have more columns, which are never read.
        max_num_requests: S, requests held at once.
        device: where logits and results live, a CPU or a CUDA device.
        logits_dtype: float32, bfloat16 or float16.
        backend: "reference" (the definition, slow, never in a capture), "eager" (plain torch), "compiled" (Inductor),
            "graph" (compiled and captured in CUDA graphs; without CUDA it runs the compiled stages directly) or "auto":
            graph on CUDA, compiled elsewhere.
        top_p_base: what top_p is a share of: "top_k", the mass after top-k, or "all", the mass of the row.
        buckets: row counts of the captured variants, with drafts counts of requests; None for the powers of two up to
            ``max_num_requests``.
        verifications: the ways of verifying drafts that ``warmup`` prepares; others run compiled, but not captured.
        probabilities: whether ``warmup`` prepares ``probs`` too.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: an argument out of range.
    """

    def __init__(
        self,
        vocab_size: int,
        max_num_requests: int,
        device: torch.device | str = "cpu",
        logits_dtype: torch.dtype = torch.float32,
        backend: str = "auto",
        top_p_base: str = "top_k",
        *,
        buckets: Iterable[int] | None = None,
        verifications: Iterable[Verification] = (),
        probabilities: bool = False,
    ) -> None:
        """Hold free slots; nothing is compiled or captured before ``warmup`` or the first call."""
        check_sampler(vocab_size, max_num_requests, torch.device(device), logits_dtype, backend, top_p_base)
        self.vocab_size, self.logits_dtype = vocab_size, logits_dtype
        self.device = torch.empty(0, device=device).device
        self.backend = {"auto": "graph" if self.device.type == "cuda" else "compiled"}.get(backend, backend)
        modes = mode_table(vocab_size, top_p_base)
        super().__init__(modes, max_num_requests, self.device)
        sizes = BucketLadder.doubling(max_num_requests).sizes if buckets is None else buckets
        self._runner = Runner(self.backend, modes, self._state.table, logits_dtype, sizes, max_num_requests)
        self._runner.prepare(checked_verifications(verifications), probabilities)
        self._offsets = torch.arange(MOST_DRAFTS, device=self.device)

    def sample(self, plan: Plan, logits: Tensor, positions: Tensor, out: SampleOutputs | None = None) -> SampleOutputs:
        """Draw one token for every row of the plan.

        Under ``torch.cuda.graph`` the compiled stages land in the engine's own graph; positions and the plan's
        ``slot_ids`` stay device inputs.

        Args:
            plan: from ``plan``, without drafts; its requests must still be held.
            logits: ``[R, >= V]`` of the sampler's dtype, any row stride.
            positions: int64 ``[R]``, >= 0, the position of the token that is drawn.
            out: tensors that take the results; then a replay allocates nothing.

        Returns:
            ``out``, or new tensors that no later call overwrites.

        Raises:
            RuntimeError: an outer capture needs a variant that was never prepared.
            TypeError, ValueError: a wrong dtype, shape, device or plan.
        """
        self._check(plan, logits, positions, drafts=False)
        if out is not None:
            check_outputs(out, SampleOutputs, plan.num_rows, 0, self.device)
        if not plan.num_rows:
            return no_tokens(self.device) if out is None else out
        tensors = {"logits": logits, "slots": plan.slot_ids, "positions": positions}
        drawn: SampleOutputs = self._runner.run(Step("sample", plan.mode), tensors, out)
        return drawn

    def draft(
        self, plan: Plan, draft_logits: Tensor, positions: Tensor, coupled: bool = True, offset: int = 0
    ) -> Draft:
        """Draw one draft for every request, as a drafter does, with the request's own parameters.

        Args:
            plan: from ``plan``, with or without drafts; one row a request.
            draft_logits: ``[N, >= V]`` of the sampler's dtype, or of 16 bits for a float32 sampler.
            positions: int64 ``[N]``, >= 0, the position of the token that is drafted.
            coupled: True races on the target's noise, so drafts for the rule ``match`` are accepted more often; False
                draws independently, which the rules ``rejection`` and ``block`` need.
            offset: drafts of the same block before this one; it keys the noise of an uncoupled draft.

        Returns:
            Tokens, status, and for an uncoupled draft a copy of its logits, for ``verify``.

        Raises:
            RuntimeError: an outer capture needs a variant that was never prepared.
            TypeError, ValueError: a wrong dtype, shape, device, offset or plan.
        """
        self.check_current(plan)
        count = len(plan.slots)
        logits = in_dtype(draft_logits, self.logits_dtype)
        check_logits(logits, count, self.vocab_size, self.logits_dtype, self.device, "draft_logits")
        check_positions(positions, count, self.device)
        check_draft(offset, coupled)
        if not count:
            return Draft(no_tokens(self.device), None if coupled else draft_logits, plan, offset)
        tensors = {"logits": logits, "slots": plan.slot_ids, "positions": positions}
        if not coupled:
            tensors["offsets"] = self._offsets[offset].expand(count)
        drawn = self._runner.run(Step("sample" if coupled else "draft", plan.mode), tensors)
        return Draft(drawn, None if coupled else draft_logits[:, : self.vocab_size].clone(), plan, offset)

    def verify(
        self,
        plan: Plan,
        logits: Tensor,
        draft_token_ids: Tensor | Sequence[Draft],
        positions: Tensor,
        rule: str = "match",
        *,
        draft_probs: Tensor | None = None,
        draft_logits: Tensor | None = None,
        out: VerifyOutputs | None = None,
    ) -> VerifyOutputs:
        """Accept the drafts of every request as far as the rule does, and draw one token more.

        Args:
            plan: from ``plan(slots, num_drafts=...)``.
            logits: ``[sum(k_n + 1), >= V]``, the rows of request 0, then of request 1, ...
            draft_token_ids: int64 ``[N, K]``, K at least the plan's width, padded with -1; or the handles of K calls of
                ``draft`` in the order of their offsets.
            positions: int64 ``[N]``, >= 0, of the first token that may be drawn.
            rule: "match": the stream is the one without drafts; "rejection", "block": the law is.
            draft_probs: float32 ``[sum(k_n), >= V]`` in [0, 1], which the drafts were drawn from; more counts as 1.
            draft_logits: ``[sum(k_n), >= V]`` of the dtypes that ``draft`` takes, filtered with the request's own
                parameters. Without either, and without handles, the drafts are one-hot.
            out: tensors that take the results, ``[N, K+1]`` and ``[N]``.

        Returns:
            ``out``, or new tensors that no later call overwrites.

        Raises:
            RuntimeError: an outer capture needs a variant that was never prepared.
            TypeError, ValueError: a wrong tensor, rule or plan; coupled drafts where the rule needs independent ones.
        """
        self._check(plan, logits, positions, drafts=True)
        check_rule(rule)
        given = (draft_probs, draft_logits)
        if not isinstance(draft_token_ids, Tensor):
            draft_token_ids, given = opened(plan, draft_token_ids, rule, given, self.device)
        return self._verified(plan, plan.mode, rule, logits, draft_token_ids, positions, given, out)

    def verify_from_probs(
        self,
        plan: Plan,
        target_probs: Tensor,
        draft_token_ids: Tensor,
        positions: Tensor,
        draft_probs: Tensor | None = None,
        rule: str = "match",
        out: VerifyOutputs | None = None,
    ) -> VerifyOutputs:
        """``verify`` for an engine that has probabilities: no filter is applied, and only the seed is used.

        Args:
            plan: as in ``verify``.
            target_probs: float32 ``[sum(k_n + 1), >= V]`` in [0, 1]; each row is divided by its sum. Smaller numbers
                and NaN count as 0, larger ones as 1, and steps of ``2**-40`` are the finest that are told apart.
            draft_token_ids: int64 ``[N, K]``; with ``positions``, ``rule`` and ``out`` as in ``verify``.
            positions: int64 ``[N]``.
            draft_probs: as in ``verify``; None for one-hot drafts.
            rule: "match", "rejection" or "block".
            out: as in ``verify``, and so is what is returned and raised.
        """
        self._check(plan, target_probs, positions, drafts=True, are_probs=True)
        check_rule(rule)
        mode, given = probabilities_mode(self.vocab_size), (draft_probs, None)
        return self._verified(plan, mode, rule, target_probs, draft_token_ids, positions, given, out)

    def probs(self, plan: Plan, logits: Tensor, out: Tensor | None = None) -> Tensor:
        """The distribution that ``sample`` draws from: float32 ``[R, V]``, exact zeros where a filter drops a token.

        Args:
            plan: from ``plan``, without drafts.
            logits: ``[R, >= V]`` of the sampler's dtype.
            out: float32 ``[R, V]`` that takes the result.

        Returns:
            ``out`` or a new tensor; rows sum to 1 within 1e-6, those of padding and of masked rows to 0.

        Raises:
            RuntimeError, TypeError, ValueError: as ``sample``.
        """
        self._check(plan, logits, None, drafts=False)
        results = None if out is None else ProbabilityOutputs(out)
        if results is not None:
            check_outputs(results, ProbabilityOutputs, plan.num_rows, self.vocab_size, self.device)
        if not plan.num_rows:
            return torch.empty(0, self.vocab_size, device=self.device) if out is None else out
        tensors = {"logits": logits, "slots": plan.slot_ids, "positions": self._offsets[0].expand(plan.num_rows)}
        made: ProbabilityOutputs = self._runner.run(Step("probabilities", plan.mode), tensors, results)
        return made.probabilities

    def warmup(self, progress: Progress | None = None, modes: Collection[str] | None = None) -> None:
        """Compile and capture what was asked for; later calls of up to ``max_num_requests`` rows never compile.

        Args:
            progress: called as ``progress(done, total, label)`` for each step traced or compiled, then each capture.
            modes: names of the modes to prepare, None for all. A batch of another takes a captured one that covers it.

        Raises:
            ValueError: a name that is no mode.
            graph_cache.CaptureError: a capture failed; the sampler stays usable, a later warmup tries again.
            RuntimeError: the current stream is being captured.
        """
        self._runner.warmup(progress, modes)

    def bind_logits(self, buffer: Tensor | None) -> None:
        """Let variants read the engine's own logits buffer in place; call ``warmup`` afterwards to capture them.

        Args:
            buffer: ``[rows, >= V]``; its first R rows are passed to ``sample`` or ``verify``. None drops the binding.

        Raises:
            TypeError, ValueError: a wrong dtype, shape or device.
        """
        if buffer is not None:
            check_logits(buffer, None, self.vocab_size, self.logits_dtype, self.device)
        self._runner.bind_logits(buffer)

    def statistics(self) -> CacheStatistics:
        """What the graph manager captured, replayed and fell back to, and the memory it holds."""
        return self._runner.statistics()

    def _verified(
        self,
        plan: Plan,
        mode: Mode,
        rule: str,
        logits: Tensor,
        draft_token_ids: Tensor,
        positions: Tensor,
        given: tuple[Tensor | None, Tensor | None],
        out: VerifyOutputs | None,
    ) -> VerifyOutputs:
        """Run a verification at the width of a variant, and hand out what the caller's width holds."""
        given = given[0], None if given[1] is None else in_dtype(given[1], self.logits_dtype)
        kinds = proposal_kinds(rule, plan, *given)
        for tensor, dtype, name in zip(given, (torch.float32, self.logits_dtype), ("probs", "logits"), strict=True):
            if tensor is not None:
                check_logits(tensor, plan.num_proposals, self.vocab_size, dtype, self.device, f"draft_{name}")
        check_drafts(draft_token_ids, len(plan.slots), plan.width, self.device)
        count, width = draft_token_ids.shape
        if out is not None:
            check_outputs(out, VerifyOutputs, count, width + 1, self.device)
        if not count:
            return no_drafts(width, self.device) if out is None else out
        step = self._runner.verification(mode, rule, kinds, width)
        proposals = proposals_of(step.mode.drafts, given, logits)
        tensors = verification_tensors(plan, logits, draft_token_ids, positions, proposals, step.width)
        made: VerifyOutputs = self._runner.run(step, tensors, out if step.width == width else None)
        if step.width == width:
            return made
        made = made._replace(token_ids=made.token_ids[:, : width + 1])
        return made if out is None else copied(made, out)

    def _check(self, plan: Plan, rows: Tensor, positions: Tensor | None, drafts: bool, are_probs: bool = False) -> None:
        """Raise unless the plan is of this sampler and of the right sort, and its tensors fit it; None is left out."""
        self.check_current(plan)
        check_sort(plan, drafts)
        name, dtype = ("target_probs", torch.float32) if are_probs else ("logits", self.logits_dtype)
        check_logits(rows, plan.num_rows, self.vocab_size, dtype, self.device, name)
        if positions is not None:
            check_positions(positions, len(plan.slots), self.device)
