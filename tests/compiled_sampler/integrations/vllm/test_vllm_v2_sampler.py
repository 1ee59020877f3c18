"""The samplers of a V2 runner against ``Sampler``, on vLLM's classes without the parts that need a GPU."""

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm")

import torch
from vllm import SamplingParams as Params
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.sample.sampler import Sampler as StockSampler
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from compiled_sampler import Sampler, SamplingParams
from compiled_sampler.integrations.vllm import install, statistics, uninstall, v2_sampler
from compiled_sampler.integrations.vllm.versions import unsupported_v2
from tests.engines.vllm_stand_in import column, runner

pytestmark = pytest.mark.full

V, SLOTS = 60, 6
LAWS = [
    {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "seed": 11},
    {"temperature": 0.0, "seed": 1, "repetition_penalty": 3.0},
    {"temperature": 1.3, "seed": 3, "min_p": 0.1},
    {"seed": 2**40, "frequency_penalty": 1.5, "logit_bias": {4: 2.0}},
]
PROMPTS = [[1, 2], [3], [4, 5, 6], [7, 8, 9, 10]]


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    def stock_init(self, **given):
        self.req_states, self.logprobs_mode, self.compute_nans = given["req_states"], "raw_logprobs", False
        self.penalties_state = SimpleNamespace()
        self.sampling_states = SimpleNamespace(
            add_request=lambda index, params: self.sampling_states.num_logprobs.__setitem__(
                index, params.logprobs or -1
            ),
            num_logprobs=np.full(SLOTS, -1),
            temperature=column(torch.float32, 1.0, SLOTS),
            max_num_logprobs=lambda indices: int(self.sampling_states.num_logprobs[indices].max()),
        )

    def counted(num_sampled, *_):  # vLLM's is a Triton kernel
        return num_sampled, torch.zeros_like(num_sampled)

    monkeypatch.setattr(StockSampler, "__init__", stock_init)
    monkeypatch.setattr(v2_sampler, "get_num_sampled_and_rejected", counted)
    uninstall()
    yield
    uninstall()


class States:
    """Request states of vLLM: what is read of them, and where requests come in."""

    def __init__(self):
        self.index = {}
        self.prefill_len = column(torch.int32, 0, SLOTS)

    def add_request(self, req_id, prompt_len, all_token_ids, **rest):
        self.index[req_id] = len(self.index)


def sampler_with(states, **settings):
    """The sampler of vLLM as a V2 runner makes it."""
    install(backend="eager", warmup="off", **settings)
    config = runner(2).vllm_config
    config.speculative_config.draft_sample_method = "probabilistic"
    given = {"vllm_config": config, "max_num_reqs": SLOTS, "vocab_size": V, "req_states": states}
    return model_runner.Sampler(**given, device=torch.device("cpu"), custom_logits_processors=[])


def verifier_of(sampler):
    made = model_runner.RejectionSampler.__new__(model_runner.RejectionSampler)
    made.sampler, made.num_speculative_steps = sampler, 2
    return made


def add(sampler, index, request_id, prompt, drawn, **law):
    tokens = {"all_token_ids": [*prompt, *drawn], "num_computed_tokens": 0, "max_tokens": 8}
    sampler.req_states.add_request(req_id=request_id, prompt_len=len(prompt), **tokens)
    sampler.add_request(index, Params(**law))


def batch_of(indices, input_positions, counts=None, **changed):
    """An input batch: ``input_positions`` of the first row of each request, ``counts`` of its drafts."""
    rows = np.array([1] * len(indices) if counts is None else [count + 1 for count in counts])
    local = np.concatenate([np.arange(count) for count in rows])
    places = np.repeat(input_positions, rows) + local
    first = np.concatenate([[0], rows.cumsum()]).astype(np.int32)
    fields = {
        "num_reqs": len(indices),
        "num_tokens": len(local),
        "idx_mapping": torch.tensor(indices),
        "idx_mapping_np": np.array(indices),
        "expanded_idx_mapping": torch.tensor(np.repeat(indices, rows)),
        "expanded_local_pos": torch.tensor(local, dtype=torch.int32),
        "positions": torch.tensor(places),
        "logits_indices": torch.arange(len(local)),
        "cu_num_logits": torch.tensor(first),
        "cu_num_logits_np": first,
        "seq_lens": torch.tensor(input_positions, dtype=torch.int32) + 1,
        "seq_lens_cpu_upper_bound": torch.tensor(input_positions, dtype=torch.int32) + 1,
        "prefill_len_np": np.zeros(len(indices), np.int32),
        "has_prefill": False,
        "num_draft_tokens_per_req": None if counts is None else np.array(counts, np.int32),
    }
    return SimpleNamespace(**{**fields, **changed})


def logits_of(rows, seed=0):
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)) * 3


def own_stream(which, steps):
    """The tokens of a request alone in a sampler of its own, whose logits are ``logits_of(1, position)``."""
    sampler = Sampler(V, 1, backend="eager", history_len=40)
    slot = sampler.add_request(SamplingParams(**LAWS[which]), PROMPTS[which])
    plan, at, tokens = sampler.plan([slot]), len(PROMPTS[which]), []
    for position in range(at, at + steps):
        tokens += sampler.sample(plan, logits_of(1, 100 * which + position), torch.tensor([position])).tolist()
    return tokens


def test_requests_at_their_index_draw_their_own_streams_in_any_order_also_after_a_preemption():
    sampler = sampler_with(States())
    streams = {which: [] for which in range(4)}
    places = {0: 5, 1: 0, 2: 3, 3: 1}
    for which, index in places.items():
        add(sampler, index, f"r{which}", PROMPTS[which], [], **LAWS[which])
    for step in range(6):
        order = [3, 0, 2, 1] if step % 2 else [1, 2, 3]
        if step == 4:  # preempted, and back at another index, which was that of a request that left
            add(sampler, places[3], "other", [1], [], seed=5)
            places[3] = 2
            add(sampler, 2, "r3", PROMPTS[3], streams[3], **LAWS[3])
        at = {which: len(PROMPTS[which]) + len(streams[which]) for which in order}
        logits = torch.cat([logits_of(1, 100 * which + at[which]) for which in order])
        made = sampler(logits, batch_of([places[which] for which in order], [at[which] - 1 for which in order]))
        assert made.num_sampled.tolist() == [1] * len(order)
        for which, token in zip(order, made.sampled_token_ids[:, 0].tolist(), strict=True):
            streams[which].append(token)
    for which, tokens in streams.items():
        assert tokens == own_stream(which, len(tokens))
    assert statistics() == {"batches": 6, "stock_batches": 0}


def test_requests_without_states_by_which_an_engine_measures_its_memory_leave_when_others_come():
    """As vLLM 0.33 adds them, with every parameter set."""
    sampler = sampler_with(States())
    for index in range(SLOTS):
        sampler.add_request(index, Params.for_sampler_warmup())
    made = sampler(logits_of(SLOTS), batch_of([*range(SLOTS)], [0] * SLOTS))
    assert (made.sampled_token_ids >= 0).all()
    assert made.logprobs_tensors is not None
    add(sampler, 2, "r0", PROMPTS[0], [], **LAWS[0])
    position = len(PROMPTS[0])
    made = sampler(logits_of(1, position), batch_of([2], [position - 1]))
    assert made.sampled_token_ids[:, 0].tolist() == own_stream(0, 1)


def test_a_row_in_the_midst_of_its_prompt_records_nothing():
    sampler, prompt = sampler_with(States()), [5, 6, 7, 8]
    law = {"temperature": 0.0, "seed": 1, "repetition_penalty": 5.0}
    add(sampler, 0, "a", prompt, [], **law)
    logits = torch.zeros(1, V)
    logits[0, 20] = 2.0
    unread = {"has_prefill": True, "prefill_len_np": np.array([4], np.int32)}
    sampler(logits, batch_of([0], [1], **unread))  # the input token of position 1; 7 stands at 2
    logits[0, 20], logits[0, 7], logits[0, 9] = 0.0, 2.0, 1.0
    made = sampler(logits, batch_of([0], [3], **unread))
    assert made.sampled_token_ids.tolist() == [[9]]  # 7 is still of the prompt, and penalised


@pytest.mark.parametrize("right", [0, 1, 2])
def test_drafts_are_verified_by_match_as_ragged_rows(right, monkeypatch):
    sampler, counts = sampler_with(States()), [2, 0, 1]
    for which in range(3):
        add(sampler, which, f"r{which}", PROMPTS[which], [], **LAWS[which])
    verifier = verifier_of(sampler)
    at = [len(prompt) for prompt in PROMPTS[:3]]
    rows = [(which, at[which] + place) for which, count in enumerate(counts) for place in range(count + 1)]
    logits = torch.cat([logits_of(1, 100 * which + position) for which, position in rows])
    plain = {which: own_stream(which, 3) for which in range(3)}
    inputs = []
    for which, count in enumerate(counts):
        drafts = [token if place < right else (token + 1) % V for place, token in enumerate(plain[which][:count])]
        inputs += [0, *drafts]
    monkeypatch.setattr(
        v2_sampler, "gather_draft_sampled", lambda *_: (torch.tensor(inputs, dtype=torch.int32), batch.positions)
    )
    batch = batch_of([0, 1, 2], [each - 1 for each in at], counts, input_ids=None)
    made = verifier(logits, batch)
    assert made.sampled_token_ids.dtype == torch.int32
    for which, count in enumerate(counts):
        emitted = min(right, count) + 1
        assert made.num_sampled[which] == emitted
        assert made.sampled_token_ids[which, :emitted].tolist() == plain[which][:emitted]


def test_drafts_whose_law_the_drafter_kept_are_verified_by_the_rule(monkeypatch):
    """Against ``verify`` of a sampler that is told the laws: softmax at the temperature, one-hot where that is 0."""
    sampler, counts, at = sampler_with(States(), rule="rejection"), [2, 1], [2, 1]
    laws = [{"temperature": 0.7, "seed": 3}, {"temperature": 0.0, "seed": 4}]
    for which, law in enumerate(laws):
        add(sampler, which, f"r{which}", PROMPTS[which], [], **law)
        sampler.sampling_states.temperature.np[which] = law["temperature"]
    verifier = verifier_of(sampler)
    logits, draft_logits = logits_of(5), logits_of(SLOTS * 2, seed=1).view(SLOTS, 2, V)
    inputs = torch.tensor([0, 7, 9, 0, int(draft_logits[1, 0].argmax())], dtype=torch.int32)
    batch = batch_of([0, 1], [each - 1 for each in at], counts, input_ids=None)
    monkeypatch.setattr(v2_sampler, "gather_draft_sampled", lambda *_: (inputs, batch.positions))
    made = verifier(logits, batch, draft_logits)
    own = Sampler(V, 2, backend="eager")
    plan = own.plan([own.add_request(SamplingParams(**law)) for law in laws], num_drafts=counts)
    probs = torch.softmax(draft_logits[[0, 0, 1], [0, 1, 0]] / 0.7, -1)
    probs[2] = torch.nn.functional.one_hot(draft_logits[1, 0].argmax(), V)
    wanted = own.verify(plan, logits, inputs[[1, 2, 4]], torch.tensor(at), "rejection", draft_probs=probs)
    assert made.num_sampled.tolist() == wanted.num_emitted.tolist()
    assert made.sampled_token_ids.tolist() == wanted.token_ids.tolist()


def test_logprobs_are_those_of_the_batch_that_asks_for_most():
    sampler = sampler_with(States())
    add(sampler, 0, "a", [1], [], seed=1, logprobs=3)
    add(sampler, 1, "b", [1], [], seed=2)
    logits = logits_of(2)
    made = sampler(logits, batch_of([0, 1], [0, 0]))
    ids, logprobs, ranks = made.logprobs_tensors[:3]
    assert ids.shape == logprobs.shape == (2, 4)
    assert ids[:, 0].tolist() == made.sampled_token_ids[:, 0].tolist()
    torch.testing.assert_close(logprobs, logits.log_softmax(-1).gather(1, ids.long()))
    assert ranks.tolist() == [int((logits[row] > logits[row, ids[row, 0]]).sum()) + 1 for row in range(2)]


def test_what_a_request_cannot_have_ends_it_alone(caplog):
    sampler = sampler_with(States())
    add(sampler, 0, "a", [1], [], seed=1, temperature=0.0)
    add(sampler, 1, "b", [1], [], seed=2, logprob_token_ids=[3], logprobs=1)
    logits = logits_of(2)
    made = sampler(logits, batch_of([0, 1], [0, 0]))
    assert made.sampled_token_ids[:, 0].tolist() == [int(logits[0].argmax()), 0]
    assert caplog.text.count("request b is not drawn here: logprob_token_ids must be None") == 1


def test_a_batch_is_given_to_vllm_with_whom_stay_requests_whose_edits_read_the_tokens_that_it_drew(monkeypatch):
    """Ours would miss them in its history; a request without such edits comes back."""
    sampler = sampler_with(States(), on_unsupported="stock")
    monkeypatch.setattr(StockSampler, "add_request", lambda *_: None)
    monkeypatch.setattr(StockSampler, "__call__", lambda *_: "stock")
    add(sampler, 0, "a", [1], [], seed=1, repetition_penalty=2.0)
    add(sampler, 1, "b", [1], [], seed=2, logprob_token_ids=[3], logprobs=1)
    add(sampler, 2, "c", [1], [], seed=3, temperature=0.0)
    logits = logits_of(3)
    assert sampler(logits[:1], batch_of([0], [0])) != "stock"
    assert sampler(logits, batch_of([0, 1, 2], [1, 0, 0])) == "stock"
    assert sampler(logits[:1], batch_of([0], [2])) == "stock"
    assert sampler(logits[:1], batch_of([2], [1])).sampled_token_ids.tolist() == [[int(logits[0].argmax())]]
    add(sampler, 0, "a2", [1], [], seed=1, repetition_penalty=2.0)
    assert sampler(logits[:1], batch_of([0], [0])) != "stock"
    assert statistics()["stock_batches"] == 2


def test_an_engine_with_a_watermark_is_refused_or_draws_as_it_did(monkeypatch):
    install()
    monkeypatch.setattr(RejectionSampler, "__call__", lambda *_: "stock")
    with pytest.raises(RuntimeError, match="watermark_config must be None"):
        model_runner.GPUWatermarkSampler(object())
    assert verifier_of(SimpleNamespace())(torch.zeros(1, V), batch_of([0], [0], [0], input_ids=None)) == "stock"


def test_it_is_put_where_a_runner_makes_its_samplers_and_taken_back():
    install()
    assert issubclass(model_runner.Sampler, StockSampler)
    assert model_runner.Sampler is not StockSampler
    uninstall()
    assert (model_runner.Sampler, model_runner.RejectionSampler) == (StockSampler, RejectionSampler)


ADAPTIVE = SimpleNamespace(enable_adaptive_verification=True)


@pytest.mark.parametrize(
    ("changed", "processors", "named"),
    [
        ({}, [], "None"),
        ({"watermark_config": object()}, [], "watermark_config"),
        ({"logprobs_mode": "raw_logits"}, [], "logprobs_mode"),
        ({}, [States()], "logits_processors must be vLLM's own, got States"),
        ({"enable_batch_sharded_sampling": True}, [], "enable_batch_sharded_sampling must be False"),
        ({"speculative_config": ADAPTIVE}, [], "enable_adaptive_verification must be False"),
    ],
)
def test_an_engine_that_cannot_be_served_is_named(changed, processors, named):
    assert named in str(unsupported_v2(runner(2, **changed).vllm_config, processors))
