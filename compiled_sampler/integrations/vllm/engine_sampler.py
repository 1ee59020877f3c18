"""What vLLM's two model runners share: a sampler with an engine's requests in its slots, and its results as records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors

from compiled_sampler.batch import SampleOutputs
from compiled_sampler.edits.names import reading
from compiled_sampler.engine.plan import Plan
from compiled_sampler.engine.requests.uploads import sent
from compiled_sampler.engine.sampler import Sampler
from compiled_sampler.integrations.vllm import parameters
from compiled_sampler.integrations.vllm.parameters import Settings
from compiled_sampler.integrations.vllm.versions import LAWS
from compiled_sampler.logprobs import Logprobs
from compiled_sampler.modes import Verification
from compiled_sampler.params import SamplingParams

MOST_TOP = 20
"""Top logprobs that a prepared step returns, of which a batch takes what it wants: vLLM's ``max_logprobs``."""


class PlannedBatch(NamedTuple):
    """What a batch of the same requests with the same numbers of drafts needs in every step."""

    slots: bytes
    counts: bytes
    plan: Plan
    ending: int | Tensor
    """The token that ends every request of the batch, or those of each, int64 ``[N]``."""
    positions: Tensor
    """int64 ``[N]``, to be written before a step that reads them: of the first token that each request may draw."""
    out: SampleOutputs
    """Where a step without drafts and logprobs writes, until the next one."""

    @property
    def reads_positions(self) -> bool:
        """Whether a step reads positions."""
        return self.plan.mode.draws or bool(self.plan.edits)


class Drawn(NamedTuple):
    """The results of a step as vLLM has them."""

    token_ids: Tensor
    """``[N, 1]``, with drafts ``[N, K+1]``; -1 after the last token, which is never the first."""
    num_emitted: Tensor | None
    """int64 ``[N]`` with drafts; 0 for a request that got the token that ends it."""
    logprobs: tuple[Tensor, Tensor, Tensor] | None
    """The fields of LogprobsTensors, a row for each place of ``token_ids``."""


def verifications(config: Any, rule: str) -> tuple[Verification, ...]:
    """The ways in which drafts of an engine are verified; none without drafts."""
    drafts = config.speculative_config
    if drafts is None:
        return ()
    width = drafts.num_speculative_tokens
    ways = [Verification("match", width)]
    if rule != "match" and drafts.draft_sample_method == "probabilistic":
        ways.append(Verification(rule, width, "probabilities"))
    return tuple(ways)


class EngineSampler:
    """A sampler for an engine whose logits are such as some, and the tokens that end its requests."""

    # What an engine's step takes on the host is above all its calls of torch, some 20 us each beside vLLM's own work.
    # So positions and tokens lie where captured variants read and write them, and the copy that gives vLLM tokens of
    # its own replaces what no row may have.

    def __init__(
        self,
        config: Any,
        vocab_size: int,
        max_num_requests: int,
        logits: Tensor,
        settings: Settings,
        token_dtype: torch.dtype,
    ) -> None:
        model, ways, device = config.model_config, verifications(config, settings.rule), logits.device
        width = max((way.width for way in ways), default=0)
        self._law, self._salt, self._vocab_size = LAWS[model.logprobs_mode], int(model.seed), vocab_size
        self._settings = settings
        rows = 1 << (max_num_requests - 1).bit_length()
        with torch.inference_mode(False):
            self.sampler = Sampler(
                vocab_size,
                max_num_requests,
                device,
                logits.dtype,
                settings.backend,
                verifications=ways,
                history_len=model.max_model_len + width + 1,
                edit_sizes=parameters.SIZES,
                captured_edits=(("penalties",),),
                captured_logprobs=(self._logprobs(0),),
            )
            self._positions = torch.zeros(rows, dtype=torch.int64, device=device)
            dtypes = token_dtype, torch.int32, torch.bool
            tokens, status, finished = (torch.empty(rows, dtype=dtype, device=device) for dtype in dtypes)
            out = SampleOutputs(tokens, status)
            self._outs = out, out._replace(finished=finished)  # of batches without edits, and with some
            self.sampler.bind(positions=self._positions, out=out)
            self.sampler.bind(out=self._outs[1])
        self._ending_of = [0] * (max_num_requests + 1)  # the last one is of slot -1
        self._planned: PlannedBatch | None = None

    def warm_up(self) -> None:
        """Ask for what batches without rarer edits run; when it is compiled, the first of each kind captures it."""
        with torch.inference_mode(False):
            self.sampler.warmup(wait=False)

    def checked(
        self, params: Any, request_id: str, *, has_tokens: bool = True
    ) -> tuple[SamplingParams | None, str | None]:
        """The parameters of a request of vLLM as ``add`` takes them, or why it cannot be drawn."""
        given = params, request_id, self._salt, self._vocab_size, self._settings
        return parameters.checked_params(*given, has_tokens=has_tokens)

    def add(self, own: SamplingParams, params: Any, prompt: list[int] | None, prompt_len: int, drawn: list[int]) -> int:
        """The slot of a request with ``params`` of vLLM, whose prompt is None where it is of embeddings."""
        if prompt is None:  # min_tokens counts embeddings, and no other edit that is admitted reads them
            prompt = [self._vocab_size] * prompt_len
        edits = own.edits
        text = (prompt, drawn) if reading(edits) else (prompt, ()) if edits else ()
        self._planned = None  # a slot that comes again is of another request
        slot = self.sampler.add_request(own, *text)
        self._ending_of[slot] = parameters.ending_token(params)
        return slot

    def remove(self, slot: int) -> None:
        """Free a slot."""
        self.sampler.remove_request(slot)
        self._planned = None

    def planned(
        self, slots: np.ndarray, counts: np.ndarray | None = None, refused: Mapping[int, int] | None = None
    ) -> PlannedBatch:
        """The plan of a batch of slots int64 ``[N]``, -1 for a row that draws nothing, and drafts of each ``[N]``.

        ``refused`` has the tokens that end the requests of some of those rows, by row.
        """
        # A batch that stays, as most do while they decode, is not planned again.
        words = slots.tobytes(), b"" if counts is None else counts.tobytes()
        if self._planned is None or self._planned[:2] != words or refused:
            listed = slots.tolist()
            plan = self.sampler.plan(listed, num_drafts=None if counts is None else counts.tolist())
            endings = [self._ending_of[slot] for slot in listed]
            for row, token in (refused or {}).items():
                endings[row] = token
            is_one = len({*endings}) == 1
            ending = endings[0] if is_one else sent(np.array(endings, np.int64), self.sampler.device)
            count, out = len(listed), self._outs[bool(plan.edits)]
            finished = None if out.finished is None else out.finished[:count]
            rows = SampleOutputs(out.token_ids[:count], out.status[:count], finished)
            self._planned = PlannedBatch(*words, plan, ending, self._positions[:count], rows)
        return self._planned

    def sample(self, batch: PlannedBatch, logits: Tensor, top: int | None) -> Drawn:
        """A token for each row; with logprobs of it and of ``top`` others, unless that is None."""
        if top is None:
            outputs = self.sampler.sample(batch.plan, logits, batch.positions, batch.out)
            return Drawn(with_endings(outputs.token_ids, batch.ending)[:, None], None, None)
        wanted = self._logprobs(top)
        outputs = self.sampler.sample(batch.plan, logits, batch.positions, logprobs=wanted)
        tokens = with_endings(outputs.token_ids.to(batch.out.token_ids.dtype), batch.ending)[:, None]
        return Drawn(tokens, None, logprob_columns(tokens, outputs.logprobs, top))

    def verify(
        self,
        batch: PlannedBatch,
        logits: Tensor,
        draft_token_ids: Tensor,
        top: int | None,
        rule: str = "match",
        draft_probs: Tensor | None = None,
    ) -> Drawn:
        """The drafts of each request that the rule accepts, and one token more."""
        wanted, given = None if top is None else self._logprobs(top), (draft_token_ids, batch.positions, rule)
        outputs = self.sampler.verify(batch.plan, logits, *given, draft_probs=draft_probs, logprobs=wanted)
        tokens = outputs.token_ids.to(batch.out.token_ids.dtype)
        tokens[:, 0] = with_endings(tokens[:, 0], batch.ending)
        logprobs = None if top is None else logprob_columns(tokens, outputs.logprobs, top)
        return Drawn(tokens, outputs.num_emitted, logprobs)

    def _logprobs(self, top: int) -> Logprobs:
        return Logprobs(top=min(max(top, MOST_TOP), self._vocab_size), of=self._law, rank=True)


def with_endings(token_ids: Tensor, ending: int | Tensor) -> Tensor:
    """New tokens ``[N]``, those of ``ending`` for requests that get none: vLLM wants a token of each."""
    if isinstance(ending, int):
        return torch.nn.functional.threshold(token_ids, -1, ending)  # one kernel
    return torch.where(token_ids < 0, ending.to(token_ids.dtype), token_ids)


def logprob_columns(token_ids: Tensor, outputs: Any, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Fields of LogprobsTensors: ids int32 and logprobs float32 ``[R, top+1]``, drawn tokens first; ranks ``[R]``.

    ``outputs`` are the LogprobOutputs of the tokens ``[N, 1]`` or ``[N, K+1]``, of ``top`` tokens or more.
    """
    rows = token_ids.numel()
    ids = torch.empty(rows, top + 1, dtype=torch.int32, device=token_ids.device)
    tops = outputs.top_token_ids, outputs.top
    top_ids, logprobs = (columns.reshape(rows, columns.shape[-1])[:, :top] for columns in tops)
    torch.cat([token_ids.reshape(rows, 1), top_ids], -1, out=ids)
    return ids, torch.cat([outputs.token.reshape(rows, 1), logprobs], -1), outputs.rank.reshape(rows)


class GaplessLogprobs(LogprobsTensors):  # type: ignore[misc]
    """Logprobs where -1 stands for tokens of the order that the law leaves out; on the host, other tokens do."""

    # vLLM makes a dictionary of a row's tokens, and decodes each. On the device the same takes ten launches.

    __slots__ = ()

    def to_cpu_nonblocking(self) -> GaplessLogprobs:
        """A copy on the host, after the current stream."""
        return type(self)(*super().to_cpu_nonblocking())

    def filter(self, mask: Tensor) -> GaplessLogprobs:
        """Some of the rows."""
        return type(self)(*super().filter(mask))

    def tolists(self, cu_num_generated_tokens: list[int] | None = None) -> Any:
        """Arrays of numpy."""
        lists = super().tolists(cu_num_generated_tokens)
        return lists._replace(logprob_token_ids=without_gaps(lists.logprob_token_ids))


def without_gaps(token_ids: np.ndarray) -> np.ndarray:
    """Tokens ``[R, n+1]``, n at most V, with others of the vocabulary for -1, so that no id stands in a row twice."""
    rows = np.flatnonzero((token_ids < 0).any(1)).tolist()
    if rows:
        token_ids = token_ids.copy()
    for row in rows:
        row_ids = token_ids[row]
        is_gap = row_ids < 0
        row_ids[is_gap] = np.setdiff1d(np.arange(len(row_ids)), row_ids)[: is_gap.sum()]
    return token_ids
