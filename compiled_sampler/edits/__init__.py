"""Edits of logits, a file each: parameters, table and stage of masks, biases, stops, penalties, DRY and bad words.

The filters of whole rows are declared in ``row_filters``; their stages stand in ``passes`` and are called by
``pipeline/row_filters.py``, as they read rows in blocks.

What they share, from the bottom up: ``edit_spec``, which their files import; the list of declarations here; their
``names``; the ``tables`` that steps read.
"""

from compiled_sampler.edits.allowed_token_ids import ALLOWED_TOKEN_IDS
from compiled_sampler.edits.bad_words import BAD_WORDS
from compiled_sampler.edits.bias import LOGIT_BIAS
from compiled_sampler.edits.dry import DRY
from compiled_sampler.edits.edit_spec import EditSpec
from compiled_sampler.edits.history import HISTORY_EDIT
from compiled_sampler.edits.min_tokens import MIN_TOKENS, STOPS
from compiled_sampler.edits.penalties import PENALTIES
from compiled_sampler.edits.row_filters import MIN_K, P_LESS, TOP_N_SIGMA, TYPICAL_P, XTC
from compiled_sampler.edits.watermark import WATERMARK

EDIT_SPECS: tuple[EditSpec, ...] = (
    ALLOWED_TOKEN_IDS,
    LOGIT_BIAS,
    MIN_TOKENS,
    PENALTIES,
    DRY,
    BAD_WORDS,
    WATERMARK,
    HISTORY_EDIT,
    STOPS,
    TOP_N_SIGMA,
    MIN_K,
    P_LESS,
    TYPICAL_P,
    XTC,
)
"""In the order in which they act; their names are in this order everywhere."""

LIST_SPECS = (*(spec for spec in EDIT_SPECS if spec.kind == "list" and spec is not MIN_TOKENS), MIN_TOKENS)
"""Those that write a few tokens of each row, in the order in which they do. Stops are masked last, as nothing lifts
-inf: the stages that add then follow each other, which lets a GPU overlap them."""

PARAMETERS = {name: parameter for spec in EDIT_SPECS for name, parameter in spec.parameters.items()}
"""The fields of ``SamplingParams`` that belong to one of them."""
