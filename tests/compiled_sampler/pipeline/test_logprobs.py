"""Logprobs against the slow oracle, and one answer in every mode, batch, schedule and chunk, compiled and on a GPU."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from compiled_sampler.batch import SampleInputs
from compiled_sampler.core.stage import Run, call
from compiled_sampler.logprobs import LAWS, LogprobInputs, Logprobs
from compiled_sampler.lowering.compiled_stages import CompiledStages
from compiled_sampler.modes import mode_table
from compiled_sampler.params import SamplingParams
from compiled_sampler.passes.kept import cut_of_drawn
from compiled_sampler.pipeline.chunks import without_kernels
from compiled_sampler.pipeline.edits import drawing_schedule
from compiled_sampler.pipeline.sample import edit_and_draw, sample_step
from compiled_sampler.pipeline.schedule import StepRun, schedule_for
from tests.builders.inputs import covering_modes, full_mode, modes_by_name, sample_inputs, slot_table
from tests.builders.logprobs import (
    EVERYTHING,
    bare,
    close,
    differing,
    logprobs,
    on_device,
    processed_scale,
    rows_of,
    wrong_fields,
)
from tests.builders.masks import MASKED_MODES, masked_inputs, params_of, stages_watched
from tests.builders.sampler import REQUESTS, same
from tests.cases.hard_rows import mixed_batch, mixed_requests
from tests.chunked import chunks_of
from tests.for_a_gpu import gpu_schedule, schedule_by_bounds
from tests.oracles import oracle_logprobs as oracle
from tests.torch_states import flushing
from tools.kernels.launches import for_a_gpu

V = 129
PARAMS = [*REQUESTS.values(), SamplingParams(temperature=0.5, top_k=1, seed=7)]
NUM_REQUESTS = 60
MODES = [each.name for each in mode_table(V, "top_k")]


def tied_rows(vocab_size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Raw and edited logits with ties, one row for each request; edits mask some tokens and move others."""
    raw = (48.0 * torch.randn(len(PARAMS), vocab_size, generator=generator)).round() / 16.0
    edited = raw.clone()
    edited[:, vocab_size // 2 :] -= 1.0
    edited[:, ::7] = -math.inf
    return raw, edited


def hard_batch(
    mode: str = "full", rows: int = 600, base: str = "top_k", dtype: torch.dtype = torch.float32, vocab_size: int = V
) -> tuple[SampleInputs, Tensor, Tensor]:
    """Inputs with rows of every kind and padding, their edited logits, and the scales of all requests."""
    requests = mixed_requests(vocab_size, NUM_REQUESTS, seed=1)
    batch = mixed_batch(requests, modes_by_name(vocab_size, base)[mode], rows, dtype, seed=3)
    slots = batch.slots.clone()
    slots[3::17] = -1
    edited = batch.logits.float() + torch.linspace(-1.0, 1.0, vocab_size)
    edited[:, ::5] = -math.inf
    inputs = SampleInputs(batch.logits, slots, batch.positions, slot_table(requests, vocab_size))
    return inputs, edited, processed_scale(requests)


@pytest.mark.parametrize(
    ("vocab_size", "base"), [(1, "top_k"), (2, "top_k"), (64, "top_k"), (129, "all"), (600, "top_k")]
)
@pytest.mark.parametrize("wanted", EVERYTHING, ids=LAWS)
def test_results_are_the_oracle_s_in_every_covering_mode(wanted, vocab_size, base, generator):
    raw, edited = tied_rows(vocab_size, generator)
    tokens = torch.randint(vocab_size, (len(PARAMS), 1), generator=generator)
    rows = list(zip(raw.tolist(), edited.tolist(), strict=True))
    for row, params in enumerate(PARAMS):
        inputs, scale = sample_inputs(raw[row : row + 1], [params]), processed_scale([params])
        given = {"edited": edited[row : row + 1], "scale": scale}
        every = [logprobs(m, inputs, tokens[row], wanted, **given) for m in covering_modes([params], vocab_size, base)]
        assert [differing(each, every[0]) for each in every] == [[]] * len(every)
        assert wrong_fields(rows_of(every[0], 0), rows[row], params, wanted, int(tokens[row]), base) == []


@pytest.mark.parametrize(
    ("shape", "temperature"), [("normal", 0.3), ("flat", 1.0), ("peaked", 2.0), ("two_levels", 0.3), ("wide", 1.0)]
)
def test_a_real_vocabulary_is_within_the_error_allowed(shape, temperature, generator):
    size = 151_936
    x = torch.randn(size, generator=generator)
    levels = torch.where(torch.arange(size) < 3, 0.0, -11.3)
    row = {"normal": 3.0 * x, "flat": 0.001 * x, "peaked": 12.0 * x, "two_levels": levels, "wide": 1e4 * x}[shape][None]
    params = SamplingParams(temperature=temperature, seed=1)
    ids = (*torch.randint(size, (300,), generator=generator).tolist(), 0, 1, 2, int(row.argmax()))
    wanted = Logprobs(of="filtered", token_ids=ids, entropy=True)
    found = logprobs(full_mode(size), sample_inputs(row, [params]), torch.zeros(1, dtype=torch.int64), wanted)
    law = (row[0].double() / temperature).log_softmax(-1)
    assert all(close(a, law[i].item()) for a, i in zip(found.given[0].tolist(), ids, strict=True))
    assert abs(found.entropy.item() - -(law.exp() * law).sum().item()) <= 1e-5


@pytest.mark.parametrize("count", [1, 64, 65, 129, 200])
@pytest.mark.parametrize("mode", ["no_filter", "full"])
def test_any_number_of_top_tokens_is_exact(count, mode, generator):
    raw, _ = tied_rows(V, generator)
    params = [PARAMS[1]] * len(raw)
    mode = modes_by_name(V)[mode]
    wanted = Logprobs(top=count, of="processed", token_ids=tuple(range(V)))
    found = logprobs(mode, sample_inputs(raw, params), torch.zeros(len(raw), dtype=torch.int64), wanted)
    assert found.top_token_ids.tolist() == [oracle.top(row, count) for row in raw.tolist()]
    beyond = torch.nn.functional.pad(found.given, (0, 1), value=-math.inf)  # id -1 is the last
    assert torch.equal(found.top, beyond.gather(1, found.top_token_ids % (V + 1)))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("wanted", EVERYTHING, ids=LAWS)
def test_hard_rows_have_the_same_bits_in_every_mode_schedule_chunk_batch_and_denormal_mode(wanted, mode):
    inputs, edited, scale = hard_batch(mode)
    chosen = modes_by_name(V)[mode]
    tokens = sample_step(chosen, inputs).token_ids
    given = {"edited": edited, "scale": scale}
    found = logprobs(chosen, inputs, tokens, wanted, **given)
    assert differing(found, logprobs(full_mode(V), inputs, tokens, wanted, **given)) == []
    for rows in (1, 8, 600):
        schedule = gpu_schedule(chosen, rows)
        by_gpu = logprobs(chosen, inputs, tokens, wanted, without_kernels, **given, schedule=schedule)
        assert differing(found, by_gpu) == []
    for changed in (chunks_of(70), flushing()):
        with changed:
            assert differing(found, logprobs(chosen, inputs, tokens, wanted, **given)) == []
    order = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(5))
    for rows in (torch.tensor([1]), order[:2], order[:33], order):
        part = SampleInputs(*(each[rows] for each in inputs[:3]), inputs.table)
        of_part = logprobs(chosen, part, tokens[rows], wanted, edited=edited[rows], scale=scale)
        assert differing(of_part, rows_of(found, rows)) == []
    assert not any(each.isnan().any() for each in found)
    nothing = (inputs.slots < 0) | ~(inputs.logits if wanted.of == "raw" else edited).gt(-math.inf).any(-1)
    assert nothing.any()
    for name in ("token", "rank", "top_token_ids", "top", "entropy"):
        values = getattr(found, name)[nothing]
        assert (values == (-math.inf if values.is_floating_point() else -1)).all()


def test_a_token_without_integer_weight_has_a_logprob():
    least = torch.finfo(torch.float32).min
    row = torch.tensor([[0.0, -60.0, -1e4, -1e38, -3e38, least]])  # the last two, scaled, exceed a float
    wanted = Logprobs(token_ids=(0, 1, 2, 3, 4, 5))
    found = logprobs(full_mode(6), sample_inputs(row, [PARAMS[1]]), torch.tensor([0]), wanted).given[0].tolist()
    assert all(close(a, b) and a > -math.inf for a, b in zip(found, row[0].tolist(), strict=True))
    halved = SamplingParams(temperature=0.5, seed=1)  # the last logprobs are below every float
    wanted = Logprobs(of="processed", token_ids=(3, 4, 5))
    found = logprobs(full_mode(6), sample_inputs(row, [halved]), torch.tensor([0]), wanted).given[0].tolist()
    assert close(found[0], -2e38)
    assert found[1:] == [-math.inf, -math.inf]


@pytest.mark.parametrize("wanted", EVERYTHING, ids=LAWS)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_beside_infinite_logits_only_such_tokens_have_a_logprob(temperature, wanted):
    row, params = (
        torch.tensor([[3.0, math.inf, 3e38, math.inf, -math.inf]]),
        SamplingParams(temperature=temperature, seed=1),
    )
    found = logprobs(full_mode(5), sample_inputs(row, [params]), torch.tensor([2]), wanted)
    assert found.given[0, 1].item() == found.top[0, 0].item()
    assert found.given[0, 0].item() == found.token.item() == -math.inf
    assert close(found.top[0, 0].item(), -math.log(2.0))
    assert torch.equal(found.top[0, 1:], torch.tensor([found.top[0, 0].item(), *[-math.inf] * 3]))
    assert found.top_token_ids.tolist() == [[1, 3, 2, 0, -1]]
    assert abs(found.entropy.item() - math.log(2.0)) <= 1e-5


def test_what_is_no_token_has_no_logprob(generator):
    inputs = sample_inputs(torch.randn(4, V, generator=generator), PARAMS[:4])
    for ids in ([-1, V, V + 5, -7], [2**31 - 1, -(2**40), V, -1]):
        found = logprobs(full_mode(V), inputs, torch.tensor(ids), Logprobs(rank=True))
        assert (found.token == -math.inf).all()
        assert (found.rank == -1).all()


RAW, PROCESSED, FILTERED = EVERYTHING
CASES = [*((mode, FILTERED) for mode in MODES), ("greedy", RAW), ("no_filter", PROCESSED)]
COMPILED = [
    ("full", FILTERED),
    *((mode, wanted) for mode, wanted in CASES if mode != "full"),
    ("full", FILTERED, "all"),
    ("full", FILTERED, "top_k", 1),
    ("no_filter", Logprobs(of="processed", top=2, rank=True, entropy=True), "top_k", 100, torch.bfloat16),
    ("no_filter", Logprobs(of="processed", top=2, rank=True, entropy=True), "top_k", 100, torch.float16),
    ("no_filter", Logprobs(top=100), "top_k", 100),
    ("full", Logprobs(of="filtered", top=3, num_kept=True, boundary=True, entropy=True), "top_k", 40, torch.float32, 2),
]
"""Mode and question, then base of top-p, rows, dtype and V where they are not the usual ones."""


@pytest.mark.parametrize(
    "case", [COMPILED[0], *(pytest.param(case, marks=pytest.mark.full) for case in COMPILED[1:])], ids=str
)
def test_compiled_hard_rows_have_the_bits_of_eager_torch(case, device):
    assert faults(CompiledStages(), device, *case) == []


@pytest.mark.gpu
@pytest.mark.parametrize(("mode", "wanted"), CASES, ids=lambda each: getattr(each, "of", each))
def test_eager_on_a_gpu_has_the_bits_of_the_cpu(mode, wanted):
    assert faults(call, torch.device("cuda"), mode, wanted) == []


def faults(
    run: Run,
    device: torch.device,
    mode: str,
    wanted: Logprobs,
    base: str = "top_k",
    rows: int = 400,
    dtype: torch.dtype = torch.float32,
    vocab_size: int = V,
) -> list[str]:
    inputs, edited, scale = hard_batch(mode, rows, base, dtype, vocab_size)
    chosen = modes_by_name(vocab_size, base)[mode]
    tokens = sample_step(chosen, inputs).token_ids
    right = logprobs(chosen, inputs, tokens, wanted, edited=edited, scale=scale)
    inputs, tokens, edited, scale = on_device((inputs, tokens, edited, scale), device)
    return differing(right, logprobs(chosen, inputs, tokens, wanted, run, edited=edited, scale=scale))


SIZES = (1, 127, 129, 600)
OF_KEPT = [*EVERYTHING, replace(EVERYTHING[1], top=80)]
OF_KEPT += [Logprobs(of="filtered"), Logprobs(num_kept=True), Logprobs(boundary=True)]


def schedules(mode, inputs, wanted):
    """That of the CPU, that of a GPU, and that of many rows there, whose race by bounds reads masks."""
    rows = len(inputs.logits)
    with for_a_gpu():
        found = [drawing_schedule(mode, inputs.logits, inputs.edits, LogprobInputs(wanted))]
    if mode.name in ("no_filter", "min_p"):
        found.append(replace(schedule_by_bounds(mode, rows, 8), reads_masks=True))
    return schedule_for(mode, rows, torch.device("cpu")), *found


def drawn(schedule, inputs, wanted, scale, run=without_kernels):
    ids = None if wanted.token_ids is None else torch.tensor([wanted.token_ids] * len(inputs.logits))
    return edit_and_draw(StepRun(run, schedule), inputs._replace(logprobs=LogprobInputs(wanted, ids, scale)))


@pytest.mark.parametrize("wanted", OF_KEPT, ids=lambda each: f"{each.label} {each.top}")
@pytest.mark.parametrize("vocab_size", SIZES)
@pytest.mark.parametrize("name", MASKED_MODES)
def test_logprobs_by_a_maximum_that_the_draw_found_and_of_masked_rows_are_those_of_a_copy(name, vocab_size, wanted):
    """Of bare rows and of rows with masks."""
    if wanted.token_ids is not None and vocab_size < 4:
        wanted = replace(wanted, token_ids=(0,))
    masked, left = masked_inputs(name, "both", vocab_size)
    mode, scale = modes_by_name(vocab_size)[name], processed_scale(params_of(name))
    plain = sample_step(mode, left)
    for inputs in (left, masked):
        logits = torch.where(inputs.logits.isnan(), torch.nan, inputs.logits)  # with the sign that CUDA gives it
        inputs = inputs._replace(logits=logits)
        right = logprobs(mode, inputs, plain.token_ids, wanted, edited=left.logits, scale=scale)
        for schedule in schedules(mode, inputs, wanted):
            made = drawn(schedule, inputs, wanted, scale)
            assert same(bare(made), plain)
            assert differing(made.logprobs, right) == []


def stages_of(name, wanted):
    """Names of the stages that a GPU runs for many rows, in their order."""
    found, inputs = list[str](), masked_inputs(name, "both", 129)[1]
    drawn(schedules(modes_by_name(129)[name], inputs, wanted)[-1], inputs, wanted, None, stages_watched(found))
    return found


@pytest.mark.parametrize("wanted", [Logprobs(of="filtered"), Logprobs(num_kept=True)], ids=lambda each: each.label)
@pytest.mark.parametrize("name", ["no_filter", "min_p"])
def test_one_more_pass_sums_the_kept_tokens(name, wanted):
    stages = stages_of(name, wanted)
    assert "order_maxima" not in stages
    assert (stages.count("cut_of_drawn"), stages.count("kept_in_blocks")) == (1, 1)


def test_a_maximum_that_is_not_the_rows_changes_logprobs(monkeypatch):
    wanted, inputs = Logprobs(of="filtered"), masked_inputs("no_filter", "both", 129)[1]
    bounded = schedules(modes_by_name(129)["no_filter"], inputs, wanted)[-1]
    right = drawn(bounded, inputs, wanted, None)

    def other(row_max, *rest, **static):
        return cut_of_drawn(row_max + 1.0, *rest, **static)

    monkeypatch.setattr("compiled_sampler.pipeline.sample.cut_of_drawn", other)
    made = drawn(bounded, inputs, wanted, None)
    assert same(bare(made), bare(right))
    assert differing(made.logprobs, right.logprobs) == ["token"]
