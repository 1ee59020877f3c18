"""The sampler: what an engine calls to hold requests, plan batches, draw tokens and verify drafts."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from compiled_sampler.batch import EditedOutputs, ProbabilityOutputs, SampleOutputs, VerifyOutputs
from compiled_sampler.edits.edit_spec import EditSizes
from compiled_sampler.edits.names import CONSUMES, MASK, RESTORES, Leave, without_vain_leave
from compiled_sampler.engine.boundary import arguments
from compiled_sampler.engine.boundary.edits import checked_custom_edits
from compiled_sampler.engine.boundary.tensors import (
    RowFormat,
    check_bound_numbers,
    check_consumes,
    check_logits,
    check_logits_buffer,
    check_outputs,
    check_positions,
)
from compiled_sampler.engine.calls import Calls, without_ring
from compiled_sampler.engine.drafts import ONE_HOT, Draft, DraftCache, Proposals, in_sampler_dtype
from compiled_sampler.engine.plan import (
    Plan,
    check_has_boundary,
    check_has_drafts,
    check_has_positions,
    padded_parents,
)
from compiled_sampler.engine.request_holder import RequestHolder
from compiled_sampler.engine.requests.custom_edits import CustomEditSet
from compiled_sampler.engine.requests.edit_slots import EditSlots, checked_edit_sizes
from compiled_sampler.engine.requests.slots import new_seed
from compiled_sampler.engine.requests.uploads import LogprobTables
from compiled_sampler.engine.step import Step
from compiled_sampler.engine.step_runner import Launch, SamplerStatistics, StepRunner
from compiled_sampler.engine.verifier import Verifier, VerifyCall
from compiled_sampler.logit_edit import LogitEdit
from compiled_sampler.logprobs import Logprobs
from compiled_sampler.lowering.compiled_stages import Progress
from compiled_sampler.modes import MOST_DRAFTS, Verification, mode_table, probabilities_mode
from compiled_sampler.shard import VocabularyShard
from compiled_sampler.speculation.row_layout import entries_of_rows
from graph_cache import BucketLadder


class Sampler(RequestHolder):
    """Draws tokens from logits and verifies drafts: seeded, exact, the same bits on every backend and in every batch.

    Requests and plans, ``add_request`` to ``plan``, are those of ``RequestHolder``.

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
            ``edits.names.EDITS``. A batch takes the captured step with the fewest edits that has all of its own, and a
            mask and leave to write logits exactly if it has them; others run compiled, but not captured.
        captured_logprobs: what calls ask for that ``warmup`` prepares ``sample`` and ``verify`` for, with each of
            ``captured_edits`` and without. Calls that ask for anything else run compiled, but not captured.
        edits: edits that the user wrote, in the order in which they act; requests name theirs in ``extra_args``.
        shard: this rank's columns of a vocabulary that is split over ranks; None for whole rows. The sampler is then
            made and called alike on every rank, and every rank gets the results of whole rows, bit for bit. Logits,
            probabilities of drafts and targets, and what ``probs`` and ``edited_logits`` return have the shard's
            columns alone; ``edit_inputs`` have those of V tokens, masks those or the shard's, alike on every rank, see
            ``sample``. Seeds of None are the same on every rank.
        check_plans: whether ``plan`` compares its batch with that of the other ranks, which waits for them: for tests
            of an engine whose ranks may disagree.

    Attributes:
        vocab_size, max_num_requests, logits_dtype, top_p_base, device: as above, the device with its index.
        backend: "eager", "compiled", "graph" or "reference"; what "auto" chose.
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
        shard: VocabularyShard | None = None,
        check_plans: bool = False,
    ) -> None:
        self.vocab_size, self.max_num_requests = arguments.checked_sizes(vocab_size, max_num_requests)
        arguments.check_choices(logits_dtype, backend, top_p_base, probabilities)
        arguments.check_generator(default_generator)
        columns = arguments.checked_columns(shard, check_plans, self.vocab_size)
        if shard is not None and default_generator is None:
            default_generator = torch.Generator().manual_seed(shard.told(new_seed(None) >> 1)[0])
        device = torch.empty(0, device=arguments.checked_device(device)).device
        length = arguments.checked_history_len(history_len)
        custom_edits = checked_custom_edits(edits, self.vocab_size, length)
        most, modes = self.max_num_requests, mode_table(self.vocab_size, top_p_base)
        self._custom = CustomEditSet(custom_edits, self.vocab_size, device, most)
        slots = EditSlots(most, self.vocab_size, checked_edit_sizes(edit_sizes), length, device, self._custom)
        sizes = (BucketLadder.doubling(most) if buckets is None else BucketLadder.of(buckets)).sizes
        checked_by = shard if check_plans else None
        super().__init__(modes, most, device, default_generator, slots, sizes[-1], checked_by)
        self.logits_dtype, self.top_p_base = logits_dtype, top_p_base
        self.backend = {"auto": "graph" if device.type == "cuda" else "compiled"}.get(backend, backend)
        self._logits, self._shard = RowFormat(columns, logits_dtype, device), shard
        ways = arguments.all_of(Verification, "verifications", verifications, "Verification('match', 3)")
        width = arguments.checked_cache_len(draft_cache_len, ways)
        self._draft_cache = DraftCache(most, width, self.vocab_size, logits_dtype, device) if width else None
        tables = LogprobTables(self._requests.staged.processed_scale)
        self._runner = StepRunner(
            self.backend, modes, self._requests, logits_dtype, sizes, most, self._draft_cache, slots, tables, shard
        )
        logprobs = arguments.checked_logprobs(captured_logprobs, self.vocab_size)
        edit_sets = arguments.checked_edits(captured_edits, length, self._custom.all_names, self._custom.expanded)
        self._runner.register(ways, probabilities, edit_sets, logprobs)
        self._calls = Calls(self._runner)
        self._verifier = Verifier(self._runner, self._logits, self._draft_cache, self._calls)
        rows = self._runner.largest_bucket
        with torch.inference_mode(False):  # an even number of each, so that all begin at a multiple of 16 bytes
            self._numbers = torch.arange(MOST_DRAFTS, device=device)[:, None].repeat(1, rows + rows % 2)

    def __repr__(self) -> str:
        """What the sampler was made of, and how many slots are free; nothing waits for the device."""
        return (
            f"Sampler(vocab_size={self.vocab_size}, max_num_requests={self.max_num_requests}, device='{self.device}', "
            f"logits_dtype={self.logits_dtype}, backend={self.backend!r}, top_p_base={self.top_p_base!r}, "
            f"num_free_slots={self.num_free_slots})"
        )

    def sample(
        self,
        plan: Plan,
        logits: Tensor,
        positions: Tensor,
        out: SampleOutputs | None = None,
        *,
        token_bitmask: Tensor | None = None,
        edit_inputs: Mapping[str, Tensor] | None = None,
        logprobs: Logprobs | None = None,
        consume_logits: Leave = False,
        draw_index: int | Tensor = 0,
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
            token_bitmask: int32 ``[R, >= ceil(V / 32)]``, a bit for each token that the row may draw, lowest first, as
                xgrammar has it; all ones masks none. With a shard either that, or the bits of the shard's columns, in
                ``ceil(n / 32)`` words for columns up to V or with padding: every call then sums masks over the ranks.
                If the columns of a rank take as many words as V tokens, masks must be of V tokens.
            edit_inputs: the tensors that edits of the user declare, by name, a row for each row of logits; those of
                edits that no request of the batch has are not read.
            logprobs: what is returned in ``SampleOutputs.logprobs``; None for nothing. It changes no token.
            consume_logits: True lets edits write into float32 logits, which saves a copy unless logprobs are "raw";
                they cannot be used again. "restore" undoes that at the end, until when nothing else may read them.
            draw_index: which of several draws of its position each row is, such as the codebook of a speech model; in
                [0, 2**24), a number or int64 or int32 ``[R]`` on the device. Steps with others than the number 0 are
                compiled, and not captured but in an engine's own graph.

        Returns:
            ``out``, or new tensors that no later call overwrites.

        Raises:
            RuntimeError: an outer capture needs a kernel that was never compiled.
            TypeError, ValueError: a wrong dtype, shape, device or plan.
        """
        out = without_ring(out) if isinstance(out, str) else out
        is_captured = self._check_current(plan)
        edits, edit_tensors = self._edits_of(plan, token_bitmask, edit_inputs, consume_logits, logprobs)
        rows, tensors = len(plan.slots), {"logits": logits, "positions": positions, **edit_tensors}
        if is_one_of_several := type(draw_index) is not int or draw_index != 0:
            if not isinstance(draw_index, Tensor):
                draw_index = self._repeated(arguments.checked_draw_index(draw_index), rows)
            tensors["draw_index"] = draw_index
        if consume_logits is not False:
            check_logits(logits, rows, self._logits)
            check_consumes(consume_logits, logits, *edit_tensors.values(), *self._custom.states.every)

        def resolve() -> Launch:  # only for the first call of its kind: ``Calls`` knows the launch of the others
            self._check_sample(plan, tensors, out, edits, logprobs)
            step = Step("sample", plan.mode, 0, edits, logprobs, is_one_of_several)
            return self._runner.resolve(step, plan, tensors, out)

        shape = plan.mode.name, rows, plan.num_drafts is None, plan.replaced
        key = "sample", *shape, edits, logprobs, is_one_of_several
        launch = self._calls.launch_for(key, (*tensors.values(), *plan.slot_buffers), out, resolve, is_captured)
        drawn: SampleOutputs = launch(plan, tensors, out)
        return drawn

    def _edits_of(
        self,
        plan: Plan,
        token_bitmask: Tensor | None,
        edit_inputs: Mapping[str, Tensor] | None,
        leave: Leave = False,
        logprobs: Logprobs | None = None,
        by_row: bool = True,
    ) -> tuple[tuple[str, ...], dict[str, Tensor]]:
        """The edits of a call, and the tensors that come with it for them, by the names of a step's inputs.

        They are those of the plan's requests, the mask if there is one, and leave to write logits where it is of use;
        ``by_row`` says whether each row draws a token.
        """
        edits = plan.edits if token_bitmask is None else (MASK, *plan.edits)
        if self._shard is not None and isinstance(token_bitmask, Tensor) and token_bitmask.device == self.device:
            token_bitmask = self._shard.whole_mask(token_bitmask, self.vocab_size)
        tensors = {} if token_bitmask is None else {MASK: token_bitmask}
        if edit_inputs is not None:
            tensors.update(self._custom.given(plan.edits, edit_inputs))
        if leave is not False:
            reads_raw = isinstance(logprobs, Logprobs) and logprobs.of == "raw"
            edits = CONSUMES if leave is True else RESTORES, *edits
            edits = without_vain_leave(edits, reads_raw=reads_raw, by_row=by_row)
        return edits, tensors

    def _check_sample(
        self, plan: Plan, tensors: dict[str, Tensor], out: Any, edits: tuple[str, ...], logprobs: Logprobs | None
    ) -> None:
        rows = len(plan.slots)
        check_has_drafts(plan, False)
        check_logits(tensors["logits"], rows, self._logits)
        check_positions(tensors["positions"], rows, self.device)
        self._custom.check_given(plan.edits, tensors, rows, self.device)
        if "draw_index" in tensors:
            arguments.check_draws_apart(edits)
            check_positions(tensors["draw_index"], rows, self.device, "draw_index")
        arguments.check_logprobs(logprobs, self.vocab_size)
        check_has_boundary(edits, logprobs)
        if out is not None:
            read = (*tensors.values(), *plan.device_tensors, *self._custom.states.every)
            check_outputs(out, SampleOutputs, rows, 0, self.device, read, has_edits=bool(edits), logprobs=logprobs)

    def draft(
        self,
        plan: Plan,
        draft_logits: Tensor,
        positions: Tensor,
        coupled: bool = True,
        offset: int = 0,
        *,
        width: int | None = None,
        token_bitmask: Tensor | None = None,
        edit_inputs: Mapping[str, Tensor] | None = None,
    ) -> Draft:
        """One draft for every request, or siblings of a tree, from a drafter's logits with the request's parameters.

        Args:
            plan: from ``plan``, with or without drafts; one row a request.
            draft_logits: ``[N, >= V]`` of the sampler's dtype, or of 16 bits for a float32 sampler.
            positions: int64 or int32 ``[N]``, >= 0, the position of the token that is drafted.
            coupled: True uses the target's noise, so that the rule "match" accepts more drafts; False uses independent
                noise, which the rules "rejection" and "block" need.
            offset: number of drafts of the same block before this one; it keys the noise of an uncoupled draft.
            width: w, siblings of a tree: the tokens ``[N, w]`` are the w best of the race that the draft wins, the best
                first, which are w draws without replacement, and -1 where filters keep fewer; of a greedy request the w
                first of the order. Nothing is written into the history or a draft cache. Pass ``token_ids`` to
                ``verify``, not the handle, and for "rejection" ``draft_logits``. None for one draft.
            token_bitmask: as in ``sample``; ``verify`` must get the same for the row that judges the draft.
            edit_inputs: as in ``sample``, the same for ``verify`` too.

        Returns:
            The handle for ``verify``: tokens, status, and of an uncoupled draft a copy of its logits, or with a draft
            cache its place there, until the next draft of the slot at this offset, or ``warmup``.

        Raises:
            RuntimeError: an outer capture needs a kernel that was never compiled.
            TypeError, ValueError: a wrong dtype, shape, device, offset or plan.
        """
        is_captured, count = self._check_current(plan), len(plan.slots)
        offset = arguments.checked_offset(offset, coupled)
        edits, edit_tensors = self._edits_of(plan, token_bitmask, edit_inputs)
        tensors = {"logits": in_sampler_dtype(draft_logits, self.logits_dtype), "positions": positions, **edit_tensors}
        if width is not None:
            width = arguments.checked_siblings(width)
        if not coupled:
            tensors["offsets"] = self._repeated(offset, count)

        def resolve() -> Launch:
            check_logits(tensors["logits"], count, self._logits, "draft_logits")
            check_positions(positions, count, self.device)
            self._custom.check_given(plan.edits, edit_tensors, count, self.device)
            if width is None:
                step = Step("sample", plan.mode, edits=edits, has_own_noise=not coupled)
            else:
                step = Step("best", plan.mode, edits=edits, num_best=width, has_own_noise=not coupled)
            return self._runner.resolve(step, plan, tensors, None)

        key = "draft", plan.mode.name, count, plan.num_drafts is None, plan.replaced, coupled, edits, width
        launch = self._calls.launch_for(key, (*tensors.values(), *plan.slot_buffers), None, resolve, is_captured)
        number = 0
        if self._draft_cache is not None and not coupled and width is None:
            number = self._draft_cache.claim(plan, offset)
        drawn: SampleOutputs = launch(plan, tensors, None)
        if width is not None:
            drawn = drawn._replace(token_ids=drawn.token_ids.view(count, width))
        is_held = not coupled and not number
        law = draft_logits[:, : self._logits.vocab_size].detach().clone() if is_held else None
        return Draft(drawn, law, plan, offset, number)

    def _repeated(self, number: int, count: int) -> Tensor:
        """The number ``count`` times, int64."""
        # A small one is at one address in a batch that may be captured, since calls are known by addresses.
        if number < MOST_DRAFTS and count <= self._numbers.shape[1]:
            return self._numbers[number, :count]
        return torch.full((count,), number, device=self.device)

    def verify(
        self,
        plan: Plan,
        logits: Tensor,
        draft_token_ids: Tensor | Sequence[Draft],
        positions: Tensor,
        rule: str = "match",
        *,
        parents: Tensor | Sequence[Sequence[int]] | None = None,
        draft_probs: Tensor | None = None,
        draft_logits: Tensor | None = None,
        draft_logits_are: str = "raw",
        out: VerifyOutputs | None = None,
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
            parents: of trees of drafts, int64 or int32, padded or flat as ``draft_token_ids``: the earlier draft that
                each one follows, by its number in the request, or -1 for one that follows the text. Row 0 of a request
                is then of the text, row j + 1 of the text after draft j and those before it. Wrong ones on the device
                set ``PARENT_OUT_OF_RANGE``; k_n numbers for each request in lists are checked here. "rejection" needs
                siblings that were drawn without replacement, in their order, from equal rows of ``draft_logits`` or
                ``draft_probs``; one that comes again sets ``DRAFT_IMPOSSIBLE``. "block" takes no trees.
            draft_probs: float32 ``[sum(k_n), >= V]`` in [0, 1], which the drafts were drawn from; more counts as 1.
            draft_logits: ``[sum(k_n), >= V]`` of the dtypes that ``draft`` takes. Without either, and without handles,
                the drafts are one-hot.
            draft_logits_are: "raw", to be edited and filtered here with the request's own parameters; or "processed" by
                the drafter, which drew from their softmax: no edit, temperature or filter is applied to them.
            out: tensors that take the results, ``[N, K+1]`` and ``[N]``; tokens and counts may be int32, see
                ``VerifyOutputs``.
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
        is_captured = self._check_current(plan)
        proposals = ONE_HOT
        if not (draft_probs is draft_logits is None and draft_logits_are == "raw"):
            proposals = Proposals(draft_probs, draft_logits, False, arguments.are_processed(draft_logits_are))
        edits, edit_tensors = self._edits_of(
            plan, token_bitmask, edit_inputs, consume_logits, logprobs, by_row=rule == "match"
        )
        if not isinstance(draft_token_ids, Tensor):
            if parents is not None and rule != "match":
                raise ValueError(
                    "draft_token_ids must be a tensor for trees under 'rejection', got handles, drawn one by one; "
                    "siblings are drawn without replacement: draft(..., coupled=False, width=w)"
                )
            draft_token_ids, proposals = self._verifier.of_handles(plan, draft_token_ids, rule, proposals, is_captured)
        tensors = logits, draft_token_ids, positions, proposals
        if parents is not None and not isinstance(parents, Tensor):
            arguments.check_not_capturing(
                self.device, "parents must be a tensor inside a capture, which forbids uploads of lists"
            )
            parents = padded_parents(plan, parents, draft_token_ids)
        call = VerifyCall(*tensors, edits, edit_tensors, consume_logits, logprobs, is_captured, parents)
        return self._verifier.verify(plan, plan.mode, rule, call, without_ring(out))

    def verify_from_probs(
        self,
        plan: Plan,
        target_probs: Tensor,
        draft_token_ids: Tensor,
        positions: Tensor,
        draft_probs: Tensor | None = None,
        rule: str = "match",
        out: VerifyOutputs | None = None,
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
        is_captured = self._check_current(plan)
        tensors = target_probs, draft_token_ids, positions, Proposals(draft_probs)
        call = VerifyCall(*tensors, plan.edits, is_captured=is_captured)
        return self._verifier.verify(plan, probabilities_mode(self.vocab_size), rule, call, without_ring(out))

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
        edits, tensors = self._inputs_by_row(plan, logits, positions, token_bitmask, edit_inputs)
        results: Any = None if out is None else ProbabilityOutputs(out)
        if results is not None:
            read = (*tensors.values(), positions, *plan.device_tensors, *self._custom.states.every)
            check_outputs(results, ProbabilityOutputs, plan.num_rows, self._logits.vocab_size, self.device, read)
        results = self._runner.launch(Step("probabilities", plan.mode, edits=edits), plan, tensors, results)
        law: Tensor = results.probabilities
        return law

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

        Rows of requests that are not covered (``RowStatus.NOT_COVERED``) are -inf. Of the logits that were sampled they
        are the first argument of ``replay``. With drafts they are the rows of ``verify``; the drafts must be in the
        history, as for ``probs``. ``verify`` and ``sample`` write the tokens that they emit; what is behind a row's own
        position does not count, so that logits may be edited again after the step.

        Args:
            plan: from ``plan``, with or without drafts.
            logits: as in ``probs``.
            positions: as in ``sample``, with drafts as in ``verify``.
            token_bitmask: as in ``sample``, one row for each row of logits.
            edit_inputs: as in ``sample``, one row for each row of logits.

        Raises:
            RuntimeError, TypeError, ValueError: as ``sample``.
        """
        edits, tensors = self._inputs_by_row(plan, logits, positions, token_bitmask, edit_inputs)
        edited: EditedOutputs = self._runner.launch(Step("edited_logits", plan.mode, edits=edits), plan, tensors)
        return edited.logits

    def _inputs_by_row(
        self,
        plan: Plan,
        logits: Tensor,
        positions: Tensor | None,
        token_bitmask: Tensor | None,
        edit_inputs: Mapping[str, Tensor] | None,
    ) -> tuple[tuple[str, ...], dict[str, Tensor]]:
        """The edits of a call that draws nothing, and its inputs, one entry a row, with drafts too."""
        self._check_current(plan)
        edits, tensors = self._edits_of(plan, token_bitmask, edit_inputs)
        check_logits(logits, plan.num_rows, self._logits)
        self._custom.check_given(plan.edits, tensors, plan.num_rows, self.device)
        check_has_positions(edits, positions)
        if positions is None:
            positions = torch.zeros(len(plan.slots), dtype=torch.int64, device=self.device)  # nothing depends on them
        else:
            check_positions(positions, len(plan.slots), self.device)
        tensors |= {"logits": logits, "positions": positions}
        if plan.num_drafts is not None:
            slots, row_positions = entries_of_rows(plan.slot_ids, plan.counts, positions, plan.num_rows)
            tensors |= {"slots": slots, "positions": row_positions}
        return edits, tensors

    def warmup(
        self, progress: Progress | None = None, modes: Collection[str] | None = None, *, wait: bool = True
    ) -> None:
        """Compile and capture every step that the sampler was made for.

        No other call waits for Inductor: it runs in eager torch, with the same bits, until background processes have
        compiled its stages. After ``warmup`` calls of up to ``max_num_requests`` rows, of verifications as many
        requests, run compiled stages and replay graphs; without graphs those of as many rows as a bucket has. Calls of
        any other kind that were made before are compiled too.

        Args:
            progress: called as ``progress(done, total, label)`` for each stage that is ready, each step that ran, then
                each capture; without ``wait`` for stages alone, by a thread of the background.
            modes: names of the modes to prepare, None for all, () for what calls have asked for alone. A batch of
                another mode is served by a captured variant of a mode that covers it, if there is one.
            wait: False asks the background for the stages and returns. When all are there, the first batch of each
                kind captures its variant, some 20 ms once; with a draft cache or a shard none does, before a
                ``warmup`` that waits. ``statistics().lowering`` says which stages are still queued.

        Raises:
            TypeError, ValueError: ``progress`` that cannot be called; a name that is no mode.
            graph_cache.CaptureError: a capture failed; the sampler stays usable, and a later warmup tries again.
            RuntimeError: the current stream is being captured.
        """
        arguments.check_progress(progress)
        self._runner.warmup(progress, modes, waits=wait)

    def bind(
        self,
        *,
        logits: Tensor | None = None,
        positions: Tensor | None = None,
        draft_token_ids: Tensor | None = None,
        slots: Tensor | None = None,
        out: SampleOutputs | VerifyOutputs | None = None,
    ) -> None:
        """Let variants that ``warmup`` captures from now on work in the engine's own tensors.

        A step is then one launch. They serve calls that bring the first rows of these tensors, and copy nothing; rows
        up to the bucket are read and written too. A call that brings other logits runs without a graph, one that brings
        all else elsewhere is replayed with copies. A reference is kept until ``unbind``; what is None stays as it was,
        and variants of what is bound anew are dropped.

        Args:
            logits: ``[>= 1, >= V]`` of the target, for ``sample``, ``draft`` and ``verify``.
            positions: int64 or int32 ``[>= 1]``.
            draft_token_ids: int64 or int32 ``[>= 1, K]``, of ``verify`` for a prepared K.
            slots: int64 or int32 ``[>= 1]``, of plans whose ``slot_ids`` are replaced by its first rows; read in place
                for batches of exactly a bucket's rows.
            out: of ``sample`` ``[>= 1]``, or of ``verify`` ``[>= 1, K + 1]`` for a prepared K; with ``finished`` for
                batches with edits, without it for others. Calls for several forms add up. Without logprobs.

        Raises:
            TypeError, ValueError: a wrong dtype, shape or device.
        """
        if logits is not None:
            check_logits_buffer(logits, self._logits)
        numbers = {"positions": positions, "draft_token_ids": draft_token_ids, "slots": slots}
        given = {name: tensor for name, tensor in numbers.items() if tensor is not None}
        for name, tensor in given.items():
            check_bound_numbers(name, tensor, self.device)
        self._runner.bind(given if logits is None else {"logits": logits, **given}, out)
        self._calls.forget()

    def unbind(self) -> None:
        """Drop all that ``bind`` was given, and the variants that were captured for it."""
        self._runner.unbind()
        self._calls.forget()

    def bind_logits(self, buffer: Tensor | None) -> None:
        """``bind(logits=buffer)``; None is ``unbind()``."""
        if buffer is None:
            self.unbind()
        else:
            self.bind(logits=buffer)

    def capture_seen(self, progress: Progress | None = None) -> int:
        """Deprecated: 0, as nothing is captured for tensors that merely came back; name them in ``bind``."""
        arguments.check_progress(progress)
        warnings.warn(
            "capture_seen() captures nothing any more; bind(logits=, positions=, out=) before warmup()",
            DeprecationWarning,
            stacklevel=2,
        )
        return 0

    def statistics(self) -> SamplerStatistics:
        """The counts of captures, replays and fallbacks, the bytes that are held, and the stages that run eager."""
        return self._runner.statistics()
