"""An LLM token sampler in plain torch, compiled by Inductor and captured in CUDA graphs, exact to the bit.

A token is a pure function of its logits row, its request's parameters, seed and position: the same in eager torch,
compiled, replayed from a graph, on the CPU and on the GPU, alone or in any batch.

Dims used in every docstring::

    R  logits rows of a batch        V  vocabulary
    S  slots: requests held at once  C  candidates: the first C tokens of a row's order
    N  requests of a batch           K  drafts of a request, at most
    D  drafts of a batch             B  blocks that a row is cut into

``core/reference.py`` is the definition, ``pipeline`` the stages in their order; ``Sampler`` is what an engine holds.
"""

from compiled_sampler.batch import RowStatus, SampleInputs, SampleOutputs, SlotTable, VerifyInputs, VerifyOutputs
from compiled_sampler.core.noise import STREAM_VERSION
from compiled_sampler.edits.edit_spec import EditSizes
from compiled_sampler.engine.drafts import Draft
from compiled_sampler.engine.plan import Plan
from compiled_sampler.engine.sampler import Sampler
from compiled_sampler.logit_edit import EditInput, EditRows, EditState, LogitEdit
from compiled_sampler.logprobs import LogprobOutputs, Logprobs
from compiled_sampler.modes import Mode, Verification
from compiled_sampler.params import SamplingParams
from compiled_sampler.replay import replay
from compiled_sampler.shard import VocabularyShard

__all__ = [
    "STREAM_VERSION",
    "Draft",
    "EditInput",
    "EditRows",
    "EditSizes",
    "EditState",
    "LogitEdit",
    "LogprobOutputs",
    "Logprobs",
    "Mode",
    "Plan",
    "RowStatus",
    "SampleInputs",
    "SampleOutputs",
    "Sampler",
    "SamplingParams",
    "SlotTable",
    "Verification",
    "VerifyInputs",
    "VerifyOutputs",
    "VocabularyShard",
    "replay",
]

__version__ = "0.1.0"
