"""The sampler: what an engine calls to hold requests, plan batches, draw tokens and verify drafts."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from compiled_sampler.batch import SampleOutputs, VerifyOutputs
from compiled_sampler.edit_names import Leave
from compiled_sampler.engine.boundary import arguments, settings
from compiled_sampler.engine.boundary.edits import checked_custom_edits
from compiled_sampler.engine.boundary.tensors import RowFormat
from compiled_sampler.engine.distributions import Distributions
from compiled_sampler.engine.drafts.draft_cache import DraftCache
from compiled_sampler.engine.drafts.draft_handles import ONE_HOT, Draft, Proposals
from compiled_sampler.engine.drawing import Drawer
from compiled_sampler.engine.plans.plan import Plan
from compiled_sampler.engine.plans.planner import Planner
from compiled_sampler.engine.requests.custom_edits import CustomEditSet
from compiled_sampler.engine.requests.edit_layout import EditSizes, checked_sizes
from compiled_sampler.engine.requests.edit_slots import EditSlots
from compiled_sampler.engine.requests.logprob_tables import LogprobTables
from compiled_sampler.engine.steps.result_ring import Ring
from compiled_sampler.engine.steps.step_runner import StepRunner
from compiled_sampler.engine.verification import Verifier
from compiled_sampler.logit_edit import LogitEdit
from compiled_sampler.logprobs import Logprobs
from compiled_sampler.modes import Verification, mode_table
from graph_cache import BucketLadder


class Sampler(Distributions):
    """Draws tokens from logits and verifies drafts: seeded, exact, the same bits on every backend and in every batch.

    Requests and plans, ``add_request`` to ``plan``, are those of ``RequestHolder``; ``warmup``, ``capture_seen``,
    ``bind_logits`` and ``statistics`` those of ``Preparation``; ``probs`` and ``edited_logits`` of ``Distributions``.

    Args:
        vocab_size: V, the true vocabulary; logits may have more columns, which are never read.
        max_num_requests: S, requests held at once.
        device: of logits and results, a CPU or a CUDA device.
        logits_dtype: float32, bfloat16 or float16.
        backend: "reference" (the definition, slow, never in a capture), "eager" (plain torch), "compiled" (Inductor),
            "graph" (compiled and captured in CUDA graphs; without CUDA it runs the compiled stages directly) or "auto":
            graph on CUDA, compiled elsewhere.
        top_p_base: what top_p is a share of: "top_k", the mass after top-k, or "all", the mass of the row.
        buckets: row counts of the captured variants, of verifications counts of requests; None for the powers of two
            up to ``max_num_requests``.
        verifications: the ways of verifying drafts that ``warmup`` prepares; others run compiled, but not captured.
        probabilities: whether ``warmup`` prepares ``probs`` too.
        draft_cache_len: K, drafts of a slot whose logits are kept by slot, in ``(S + 1) * K * V`` logits of device
            memory, and verified where they are; uncoupled drafts then need offsets below K. 0: handles hold copies.
        default_generator: a ``torch.Generator`` of the CPU, such as ``torch.default_generator``, that seeds of None are
            drawn from, in the order of ``add_request``; None for ``os.urandom``.
        history_len: L, positions of each request whose tokens are kept, in ``(S + 1) * L * 12`` bytes of device memory,
            for penalties and bad words; 0 for none.
        edit_sizes: entries that biases, stop tokens and bad words of a request may have; None for ``EditSizes()``.
        captured_edits: the edits of batches that ``warmup`` prepares every step for, each as names of
            ``edit_names.EDITS``. A batch takes the captured step with the fewest edits that has all of its own, and a
            mask and leave to write logits exactly if it has them; others run compiled, but not captured.
        captured_logprobs: what calls ask for that ``warmup`` prepares ``sample`` and ``verify`` for, with each of
            ``captured_edits`` and without. Calls that ask for anything else run compiled, but not captured.
        edits: edits that the user wrote, in the order in which they act; requests name theirs in ``extra_args``.

    Attributes:
        vocab_size, max_num_requests, logits_dtype, top_p_base, device: as above, the device with its index.
        backend: "eager", "compiled" or "graph".
        modes: the mode table, cheapest mode first.

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
        draft_cache_len: int = 0,
        default_generator: torch.Generator | None = None,
        history_len: int = 0,
        edit_sizes: EditSizes | None = None,
        captured_edits: Iterable[Collection[str]] = (),
        captured_logprobs: Iterable[Logprobs] = (),
        edits: Iterable[LogitEdit] = (),
    ) -> None:
        """Create free slots; nothing is compiled or captured before ``warmup`` or the first call."""
        self.vocab_size, self.max_num_requests = settings.checked_sizes(vocab_size, max_num_requests)
        settings.check_choices(logits_dtype, backend, top_p_base, probabilities)
        settings.check_generator(default_generator)
        self.logits_dtype, self.top_p_base = logits_dtype, top_p_base
        self.device = torch.empty(0, device=settings.checked_device(device)).device
        self.backend = {"auto": "graph" if self.device.type == "cuda" else "compiled"}.get(backend, backend)
        self.modes = mode_table(self.vocab_size, top_p_base)
        most, form = self.max_num_requests, RowFormat(self.vocab_size, logits_dtype, self.device)
        length = settings.checked_history_len(history_len)
        custom = CustomEditSet(checked_custom_edits(edits, self.vocab_size, length), self.vocab_size, self.device, most)
        slots = EditSlots(most, self.vocab_size, checked_sizes(edit_sizes), length, self.device, custom)
        planner = Planner(self.modes, most, self.device, default_generator, slots)
        sizes = BucketLadder.doubling(most).sizes if buckets is None else buckets
        prepared = settings.checked_verifications(verifications)
        width = settings.checked_cache_len(draft_cache_len, prepared)
        cache = DraftCache(most, width, *form) if width else None
        asked = LogprobTables(planner.staged.processed_scale)
        runner = StepRunner(self.backend, self.modes, planner.staged, logits_dtype, sizes, most, cache, slots, asked)
        captured = settings.checked_logprobs(captured_logprobs, self.vocab_size)
        of_batches = settings.checked_edits(captured_edits, length, custom.all_names, custom.expanded)
        runner.prepare(prepared, probabilities, of_batches, captured)
        super().__init__(planner, runner, Drawer(runner, form, cache), form)
        self._verifier = Verifier(runner, form, cache)

    def __repr__(self) -> str:
        """What the sampler was made of, and how many slots are free; nothing waits for the device."""
        return (
            f"Sampler(vocab_size={self.vocab_size}, max_num_requests={self.max_num_requests}, device='{self.device}', "
            f"logits_dtype={self.logits_dtype}, backend={self.backend!r}, top_p_base={self.top_p_base!r}, "
            f"num_free_slots={self.num_free_slots})"
        )

    def __reduce__(self) -> NoReturn:
        """Refuse ``copy.copy``, ``copy.deepcopy`` and ``pickle``.

        Raises:
            TypeError: always; its graphs read the memory that they were captured with.
        """
        raise TypeError(
            "a Sampler must not be copied or pickled, as captured graphs read its memory; share it, or make another "
            "with the same arguments and add_request() what is held here"
        )

    def sample(
        self,
        plan: Plan,
        logits: Tensor,
        positions: Tensor,
        out: SampleOutputs | Ring | None = None,
        *,
        token_bitmask: Tensor | None = None,
        edit_inputs: Mapping[str, Tensor] | None = None,
        logprobs: Logprobs | None = None,
        consume_logits: Leave = False,
    ) -> SampleOutputs:
        """One token for every row of the plan, of the law of ``probs`` up to the rounding of noise.

        Noise is rounded to an ulp of the scaled logit: of equal logits near 1e6, low ids win a few per cent more often.
        Under ``torch.cuda.graph`` the compiled stages are captured into the engine's own graph, which reads ``logits``,
        ``positions`` and ``plan.slot_ids`` at every replay.

        Args:
            plan: from ``plan``, without drafts; its requests must still be held.
            logits: ``[R, >= V]`` of the sampler's dtype, any row stride.
            positions: int64 or int32 ``[R]``, >= 0, the position of the token that each row draws.
            out: tensors that take the results; a replay then allocates nothing. ``token_ids`` may be int32, see
                ``SampleOutputs``; with edits there must be a field ``finished``, with logprobs a field ``logprobs``.
                "ring" for tensors of the sampler, which the second next call with results of this form overwrites.
            token_bitmask: int32 ``[R, >= ceil(V / 32)]``, a bit for each token that the row may draw, lowest first, as
                xgrammar has it; all ones masks none.
            edit_inputs: the tensors that edits of the user declare, by name, a row for each row of logits; those of
                edits that no request of the batch has are not read.
            logprobs: what is returned in ``SampleOutputs.logprobs``; None for nothing. It changes no token.
            consume_logits: True lets edits write into float32 logits, which saves a copy unless logprobs are "raw";
                they cannot be used again. "restore" undoes that at the end, until when nothing else may read them.

        Returns:
            ``out``, or new tensors that no later call overwrites.

        Raises:
            RuntimeError: an outer capture needs a kernel that was never compiled.
            TypeError, ValueError: a wrong dtype, shape, device or plan.
        """
        options = consume_logits, logprobs, self._planner.check_current(plan)
        return self._drawer.sample(plan, logits, positions, out, (token_bitmask, edit_inputs), options)

    def draft(
        self,
        plan: Plan,
        draft_logits: Tensor,
        positions: Tensor,
        coupled: bool = True,
        offset: int = 0,
        *,
        token_bitmask: Tensor | None = None,
        edit_inputs: Mapping[str, Tensor] | None = None,
    ) -> Draft:
        """One draft for every request, drawn from a drafter's logits with the request's own parameters.

        Args:
            plan: from ``plan``, with or without drafts; one row a request.
            draft_logits: ``[N, >= V]`` of the sampler's dtype, or of 16 bits for a float32 sampler.
            positions: int64 or int32 ``[N]``, >= 0, the position of the token that is drafted.
            coupled: True uses the target's noise, so that the rule "match" accepts more drafts; False uses independent
                noise, which the rules "rejection" and "block" need.
            offset: number of drafts of the same block before this one; it keys the noise of an uncoupled draft.
            token_bitmask: as in ``sample``; ``verify`` must get the same for the row that judges the draft.
            edit_inputs: as in ``sample``, the same for ``verify`` too.

        Returns:
            The handle for ``verify``: tokens, status, and of an uncoupled draft a copy of its logits, or with a draft
            cache its place there, until the next draft of the slot at this offset, ``warmup`` or ``capture_seen``.

        Raises:
            RuntimeError: an outer capture needs a kernel that was never compiled.
            TypeError, ValueError: a wrong dtype, shape, device, offset or plan.
        """
        is_captured, of_edits = self._planner.check_current(plan), (token_bitmask, edit_inputs)
        return self._drawer.draft(plan, draft_logits, positions, coupled, offset, of_edits, is_captured)

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
        draft_logits_are: str = "raw",
        out: VerifyOutputs | Ring | None = None,
        bonus_token_ids: None = None,
        token_bitmask: Tensor | None = None,
        edit_inputs: Mapping[str, Tensor] | None = None,
        logprobs: Logprobs | None = None,
        consume_logits: Leave = False,
    ) -> VerifyOutputs:
        """The drafts of every request that the rule accepts, and one token more.

        Args:
            plan: from ``plan(slots, num_drafts=...)``; its requests must still be held.
            logits: ``[sum(k_n + 1), >= V]`` of the sampler's dtype, the rows of request 0, then of request 1, ...
            draft_token_ids: int64 or int32; padded ``[N, K]``, K at least the plan's width; or flat ``[sum(k_n)]``,
                the drafts of request 0, then of request 1, ...; or the handles of K calls of ``draft`` in the order of
                their offsets.
            positions: int64 or int32 ``[N]``, >= 0, the position of the first token that may be drawn.
            rule: "match" keeps the very tokens of sampling without drafts; "rejection" and "block" keep their law.
            draft_probs: float32 ``[sum(k_n), >= V]`` in [0, 1], which the drafts were drawn from; more counts as 1.
            draft_logits: ``[sum(k_n), >= V]`` of the dtypes that ``draft`` takes. Without either, and without handles,
                the drafts are one-hot.
            draft_logits_are: "raw", to be edited and filtered here with the request's own parameters; or "processed" by
                the drafter, which drew from their softmax: no edit, temperature or filter is applied to them.
            out: tensors that take the results, ``[N, K+1]`` and ``[N]``; tokens and counts may be int32, see
                ``VerifyOutputs``; or "ring", as in ``sample``.
            bonus_token_ids: refused; the token after the last accepted draft is drawn here, from its own row.
            token_bitmask: as in ``sample``, one row for each row of logits: row j is of the text after j drafts.
            edit_inputs: as in ``sample``, one row for each row of logits.
            logprobs: as in ``sample``, of the tokens that are emitted.
            consume_logits: as in ``sample``, for ``logits`` alone; of no use for "raw" under "rejection" and "block".

        Returns:
            ``out``, or new tensors that no later call overwrites.

        Raises:
            RuntimeError: an outer capture needs a kernel that was never compiled.
            TypeError, ValueError: a wrong tensor, rule or plan; coupled drafts where the rule needs independent ones.
        """
        arguments.check_no_bonus(bonus_token_ids)
        is_captured = self._planner.check_current(plan)
        proposals = ONE_HOT
        if not (draft_probs is draft_logits is None and draft_logits_are == "raw"):
            proposals = Proposals(draft_probs, draft_logits, False, arguments.are_processed(draft_logits_are))
        options = (token_bitmask, edit_inputs), (consume_logits, logprobs, is_captured)
        return self._verifier.verify(plan, logits, draft_token_ids, positions, rule, proposals, out, *options)

    def verify_from_probs(
        self,
        plan: Plan,
        target_probs: Tensor,
        draft_token_ids: Tensor,
        positions: Tensor,
        draft_probs: Tensor | None = None,
        rule: str = "match",
        out: VerifyOutputs | Ring | None = None,
        *,
        bonus_token_ids: None = None,
        logprobs: None = None,
    ) -> VerifyOutputs:
        """``verify`` for an engine that has probabilities: no edit, temperature or filter is applied to them.

        The seed draws. As in ``verify``, stop tokens end a request and the history takes its drafts and tokens;
        ``min_tokens`` is an edit, which holds nothing back here. Requests with a watermark are refused.

        Args:
            plan: as in ``verify``.
            target_probs: float32 ``[sum(k_n + 1), >= V]`` in [0, 1]; each row is divided by its sum. Smaller numbers
                and NaN count as 0, larger ones as 1; the resolution is ``2**-40``.
            draft_token_ids: tensor as in ``verify``.
            positions: as in ``verify``.
            draft_probs: as in ``verify``; None for one-hot drafts.
            rule: "match", "rejection" or "block".
            out: as in ``verify``; it is returned. None for new tensors, which no later call overwrites.
            bonus_token_ids: refused, as in ``verify``.
            logprobs: refused; the caller has the probabilities.

        Raises:
            RuntimeError, TypeError, ValueError: as ``verify``.
        """
        arguments.check_no_bonus(bonus_token_ids)
        arguments.check_no_logprobs(logprobs)
        is_captured = self._planner.check_current(plan)
        given = plan, target_probs, draft_token_ids, positions, rule, Proposals(draft_probs)
        return self._verifier.verify_from_probs(*given, out=out, is_captured=is_captured)
