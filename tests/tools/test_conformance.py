"""Runs of the conformance suite side by side: sections of one target are one column."""

from tools.conformance import merged, rendered


def run(target: str, question: str, outcome: str = "passed", device: str = "cpu") -> dict[str, object]:
    """A run of one question."""
    answered = {"question": question, "outcome": outcome, "detail": "", "power": "1%", "seconds": 2.0, "repeat": "x"}
    made = {"target": target, "device": device, "versions": {"torch": "2.0"}, "command": f"ask {question}"}
    return {**made, "results": [answered]}


def test_sections_of_one_target_are_one_column() -> None:
    (column,) = merged([run("ours", "law.a"), run("ours", "cost.b", "failed")])
    text = rendered({"runs": [column]})
    assert "| `law.a` | yes |" in text
    assert "| `cost.b` | **no** |" in text
    assert "4 s; `ask law.a; ask cost.b`" in text


def test_questions_of_a_section_with_equal_answers_share_a_line() -> None:
    asked = [run("ours", name) for name in ("law.a", "law.b", "cost.c")]
    (column,) = merged([*asked, run("ours", "law.d", "not asked")])
    lines = rendered({"runs": [column]}).splitlines()
    assert lines[2:5] == ["| `law.a`, `law.b` | yes |", "| `cost.c` | yes |", "| `law.d` | - |"]


def test_a_question_that_is_asked_again_has_its_last_answer() -> None:
    (column,) = merged([run("ours", "law.a", "failed"), run("ours", "law.a")])
    assert [each["outcome"] for each in column["results"]] == ["passed"]


def test_other_targets_and_machines_have_columns_of_their_own() -> None:
    assert len(merged([run("ours", "law.a"), run("theirs", "law.a"), run("ours", "law.a", device="cuda")])) == 3
