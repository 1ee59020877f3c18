"""The verdict of the tool that runs SGLang on a GPU: it must see a row of the same logits with another token."""

from typing import Any

from tools.engines.sglang_gpu import compared
from tools.engines.sglang_process import REQUESTS

FIRST = len(REQUESTS[0][0])


def runs(tokens: list[int], digests: list[str]) -> dict[str, Any]:
    logits = {str(FIRST + place): digest for place, digest in enumerate(digests)}
    return {"rows": {"0": {"tokens": tokens, "logits": logits}}, "cached": 0}


def test_a_row_of_the_same_logits_and_another_token_is_counted_and_one_of_other_logits_is_not() -> None:
    alone = {"alone 0": runs([4, 5, 6], ["a", "b", "c"])}
    same = compared({"ours": alone, "ours_eager": {"alone 0": runs([4, 5, 6], ["a", "b", "c"])}})
    assert same["ours"] == {"rows": 3, "seen again": 3, "with the same logits and another token": 0}
    other = compared({"ours": alone, "ours_eager": {"alone 0": runs([4, 9, 8], ["a", "b", "d"])}})
    assert other["ours"] == {"rows": 4, "seen again": 2, "with the same logits and another token": 1}


def test_an_engine_that_did_not_answer_is_named() -> None:
    assert compared({"ours": {"error": "late"}, "stock_seeded": {"batch": {"error": "ended"}}}) == {
        "ours": "late",
        "stock_seeded batch": "ended",
    }
