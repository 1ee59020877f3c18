"""Known answers: what is compared, and that a stage which differs runs in eager torch and is named."""

import math
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from compiled_sampler import Sampler
from compiled_sampler.batch import DraftTable, SampleInputs, SlotTable, VerifyInputs
from compiled_sampler.lowering import known_answers
from compiled_sampler.lowering.compiling import stage_code
from compiled_sampler.lowering.known_answers import VARIABLE
from compiled_sampler.lowering.known_inputs import KINDS, hard_inputs, rounds
from compiled_sampler.lowering.stages.bit_equality import difference
from compiled_sampler.lowering.status import StageWarning
from compiled_sampler.modes import Verification, mode_table, probabilities_mode, verifying
from compiled_sampler.params import SamplingParams
from compiled_sampler.pipeline.sample import sample_step
from tests.builders.inputs import slot_table
from tests.builders.sampler import REQUESTS, SHARED_SLOTS, V, drawn, same, shared_sampler

MODES = {mode.name: mode for mode in mode_table(V, "top_k")}


class OffByOne:
    """A compiled stage whose integers are one too large."""

    def __init__(self, made) -> None:
        """Of the right one."""
        self._made = made

    def __call__(self, *tensors):
        """The results, spoilt."""
        return tree_map_only(Tensor, lambda x: x if x.dtype == torch.bool else x + 1, self._made(*tensors))

    def guard_check(self, *tensors) -> bool:
        """As the right one."""
        return self._made.guard_check(*tensors)

    def disable_guard_check(self) -> None:
        """As the right one."""
        self._made.disable_guard_check()


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The stage ``first_from_blocks`` is compiled wrongly, and nothing is kept on disk."""
    right = stage_code.compiled

    def compiled(stage, *rest):
        made = right(stage, *rest)
        return OffByOne(made) if stage.__name__.startswith("first_from_blocks") else made

    monkeypatch.setattr(stage_code, "compiled", compiled)
    with torch._inductor.config.patch(fx_graph_cache=False):
        yield


def sampling_inputs(rows: int, slots: int = 5) -> SampleInputs:
    """A batch of padding whose rows are longer than V."""
    table, zeros = slot_table([SamplingParams(seed=1)] * slots, V), torch.zeros(rows, dtype=torch.int64)
    return SampleInputs(torch.zeros(rows, V + 5)[:, :V], zeros - 1, zeros, table)


def layouts(inputs) -> list[tuple]:
    tensors = [each for each in inputs if isinstance(each, Tensor)]
    return [(x.shape, x.stride(), x.dtype) for x in (*tensors, *inputs.table)]


def test_known_inputs_have_the_layout_of_the_batch_and_follow_from_the_round():
    like = sampling_inputs(9)
    made = hard_inputs(MODES["full"], like, 0)
    assert layouts(made) == layouts(like)
    assert like.logits.count_nonzero() == 0
    assert difference(made, hard_inputs(MODES["full"], like, 0)) == ""
    assert difference(made, hard_inputs(MODES["full"], like, 1)) != ""


@pytest.mark.parametrize("rows", [1, 2, 40])
def test_rows_meet_every_kind(rows):
    assert len(rounds(sampling_inputs(rows))) * rows >= len(KINDS)
    logits = torch.cat(
        [hard_inputs(MODES["full"], sampling_inputs(rows), n).logits for n in rounds(sampling_inputs(rows))]
    )
    assert logits.isnan().any(-1).any()
    assert (logits == math.inf).any()
    assert (logits == -math.inf).all(-1).any()
    assert ((logits != 0) & (logits.abs() < 1e-38)).any()
    assert (logits == 0).all(-1).any()


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_parameters_are_such_as_the_mode_covers(mode):
    table = hard_inputs(mode, sampling_inputs(4, slots=64), 0).table
    greedy = table.noise_mask == 0
    drawn_from = SlotTable(*(column[~greedy] for column in table[:-1]), table.unserved)
    assert greedy.any()
    assert greedy.all() == (not mode.draws)
    assert ((drawn_from.top_p < 1).any() == bool(mode.capacity)) or not mode.draws
    assert (drawn_from.min_p_log2 > -math.inf).any() == mode.filters_min_p
    if mode.draws and not mode.beyond_candidates:
        assert (drawn_from.top_k <= mode.capacity).all() if mode.capacity else (drawn_from.top_k == V).all()
    assert ((table.top_k >= 1) & (table.top_k <= V)).all()


@pytest.mark.parametrize("rows", [3, 5, 12])
def test_drafts_fit_the_rows_of_logits(rows):
    mode, like = verifying(MODES["no_filter"], "rejection", "probabilities"), sampling_inputs(3)
    drafts, zeros = torch.full((3, 3), -1), torch.zeros(3, dtype=torch.int64)
    inputs = VerifyInputs(torch.zeros(rows, V), zeros, zeros, zeros - 1, drafts, torch.zeros(9, V), like.table)
    made = hard_inputs(mode, inputs, 0)
    assert layouts(made) == layouts(inputs)
    assert (made.num_drafts + 1).sum() <= rows
    assert made.num_drafts.max() == min(3, rows - 3)
    assert ((made.draft_token_ids >= 0).sum(-1) == made.num_drafts).all()


def test_a_draft_table_holds_rows_of_every_kind_and_is_not_the_one_given():
    mode, like = verifying(MODES["no_filter"], "rejection", "cache"), sampling_inputs(3)
    drafts, zeros, table = torch.full((3, 3), -1), torch.zeros(3, dtype=torch.int64), torch.zeros(9, 4, V).bfloat16()
    inputs = VerifyInputs(torch.zeros(12, V), zeros, zeros, zeros - 1, drafts, DraftTable(table), like.table)
    made = hard_inputs(mode, inputs, 0).proposals
    assert isinstance(made, DraftTable)
    assert (made.logits.shape, made.logits.dtype, made.logits.stride()) == (table.shape, table.dtype, table.stride())
    assert made.logits.isnan().any()
    assert not table.any()


def test_probabilities_are_probabilities():
    rows = hard_inputs(probabilities_mode(V), sampling_inputs(12), 0).logits
    assert not (rows < 0).any()
    assert not (rows > 1).any()


def test_every_stage_of_a_step_that_inductor_sees_is_compared():
    eager, compared = [], []

    def watch(stage, /, *tensors, **static):
        eager.append(stage)
        return stage(*tensors, **static)

    stages = mock.Mock(
        side_effect=lambda stage, *tensors, **static: compared.append(stage) or stage(*tensors, **static)
    )
    like = sampling_inputs(4)
    known_answers.compare(sample_step, MODES["full"], like, stages)
    sample_step(MODES["full"], hard_inputs(MODES["full"], like, 0), watch)
    assert {each for each in eager if not known_answers.tuning_of(each).opaque} <= set(compared)
    assert not any(known_answers.tuning_of(each).opaque for each in compared)
    assert not stages.run_eagerly.called


def test_compiled_stages_give_the_known_answers(monkeypatch):
    monkeypatch.setenv(VARIABLE, "1")
    verifications = [Verification("match", 2), Verification("rejection", 2)]
    sampler = Sampler(V, SHARED_SLOTS, backend="compiled", verifications=verifications)
    with mock.patch.object(known_answers, "compare", wraps=known_answers.compare) as comparing:
        sampler.warmup(modes=["greedy", "no_filter"])
    assert comparing.call_count >= 8
    assert sampler.statistics().lowering.eager_stages == {}


def test_warmup_compares_nothing_on_a_known_torch(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    with mock.patch.object(known_answers, "compare") as comparing:
        shared_sampler(V).warmup(modes=["greedy"])
    assert not comparing.called


@pytest.mark.usefixtures("planted")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own, passed on by pytest.warns
def test_a_stage_that_differs_runs_eager_and_is_named(monkeypatch):
    monkeypatch.setenv(VARIABLE, "1")
    sampler, reference = Sampler(V, 4, backend="compiled"), shared_sampler(V, backend="eager")
    with pytest.warns(StageWarning, match=r"stage first_from_blocks runs in eager torch.*differs") as caught:
        sampler.warmup(modes=["greedy"])
    assert sum(issubclass(each.category, StageWarning) for each in caught) == 1
    assert list(sampler.statistics().lowering.eager_stages) == ["first_from_blocks"]
    for rows in (1, 3):
        logits = torch.randn(rows, V)
        wanted = drawn(reference, [REQUESTS["greedy"]] * rows, logits)
        assert same(drawn(sampler, [REQUESTS["greedy"]] * rows, logits), wanted)


@pytest.mark.usefixtures("planted")
def test_without_a_comparison_the_difference_would_be_seen(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    sampler, reference = Sampler(V, 4, backend="compiled"), shared_sampler(V, backend="eager")
    logits = torch.randn(3, V)
    wanted = drawn(reference, [REQUESTS["greedy"]] * 3, logits)
    assert not same(drawn(sampler, [REQUESTS["greedy"]] * 3, logits), wanted)


@pytest.mark.usefixtures("planted")
@pytest.mark.filterwarnings("ignore::compiled_sampler.lowering.inductor.versions.UnknownTorchWarning")
def test_on_an_unknown_torch_a_stage_is_compared_at_its_first_call_too(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "99.2.0")
    sampler, reference = Sampler(V, 4, backend="compiled"), shared_sampler(V, backend="eager")
    logits = torch.randn(3, V)
    with pytest.warns(StageWarning, match="first_from_blocks"):
        found = drawn(sampler, [REQUESTS["greedy"]] * 3, logits)
    assert same(found, drawn(reference, [REQUESTS["greedy"]] * 3, logits))


@pytest.mark.parametrize(
    ("found", "wanted", "why"),
    [
        (torch.tensor([1.0, math.nan]), torch.tensor([1.0, -math.nan]), ""),
        ((torch.tensor([1]), None), (torch.tensor([1]), None), ""),
        (torch.tensor([math.nan]).view(torch.int32), torch.tensor([2**31 - 1], dtype=torch.int32), ""),
        (torch.tensor([math.inf]).view(torch.int32), torch.tensor([2**31 - 1], dtype=torch.int32), "differs in 1 of 1"),
        (torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]), "differs in 1 of 2"),
        (torch.tensor([1.0]).half(), torch.tensor([1.0]), "float16"),
        (torch.tensor([[1]]), torch.tensor([1]), r"\[1, 1\]"),
        ((torch.tensor([1]), None), (torch.tensor([1]), torch.tensor([1])), "NoneType"),
        ((torch.tensor([1]),), torch.tensor([1]), ""),
        ((torch.tensor([1]), torch.tensor([1])), torch.tensor([1]), "2 results instead of 1"),
    ],
)
def test_results_are_compared_bit_for_bit(found, wanted, why):
    reason = difference(found, wanted)
    assert bool(reason) == bool(why)
    assert why.replace("\\", "") in reason
