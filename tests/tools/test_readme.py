"""README.md and docs: their generated parts and pictures follow the results files, and a stale page is noticed."""

import json
import re
from pathlib import Path

import pytest

from compiled_sampler.modes import mode_table
from tools import pictures, readme
from tools.conformance import merged, rendered
from tools.readme import ROOT

ENVIRONMENT = {"device": "Some GPU", "torch": "2.0", "triton": "3.0", "python": "3.11", "commit": "abc123"}
ENVIRONMENT["date"] = "2020-01-01 00:00 UTC"
NAMES = list(readme.generated(Path("nowhere")))
SKELETONS = ["\n".join(f"<!-- {name} -->\nold\n<!-- /{name} -->" for name in part) for part in (NAMES[:5], NAMES[5:])]


def cell(case, rows, us, **more):
    batch = {"num_drafts": 0, "vocab": 151_936, "dtype": "float32", "distribution": "peaked"}
    bound = {"floor_us": 1.25, "floor_kind": "bytes", "num_kernels": 2}
    return {"case": case, "mode": "full", "rows": rows, **batch, "us": us, **bound, "baselines": {}, **more}


@pytest.fixture
def arguments(tmp_path):
    (tmp_path / "docs").mkdir()
    for page, text in zip([*readme.pages(tmp_path), tmp_path / "docs" / "page.md"], SKELETONS, strict=True):
        page.write_text(text)
    return ["--pages", str(tmp_path), "--results", str(tmp_path)]


def text_of(folder):
    return "\n".join(page.read_text() for page in readme.pages(folder))


def store(folder, *cells):
    (folder / "bench.json").write_text(json.dumps({**ENVIRONMENT, "table": cells}))


def test_parts_are_written_from_the_results_files_and_a_missing_one_is_said_to_be_missing(tmp_path, arguments):
    store(tmp_path, cell("greedy", 8, 4.5), cell("greedy", 1, 2.04), cell("p .9", 8, 30.0))
    assert readme.main(arguments) == 0
    lines = text_of(tmp_path).splitlines()
    assert "| greedy | 2.0 / 6.5 | 4.5 / 8.9 |" in lines
    assert lines.count(readme.NOT_MEASURED) == 9
    assert not any("abc123" in line for line in lines)
    store(tmp_path, cell("greedy", 1, 2.04, replay_us=5.66), cell("greedy", 8, 4.5))
    readme.main(arguments)
    assert "| case | B=1 |\n| --- | ---: |\n| greedy | 2.0 / 5.7 |\n" in text_of(tmp_path)  # a replay was measured


def test_check_notices_a_stale_text_and_writes_nothing(tmp_path, arguments, capsys):
    assert readme.main([*arguments, "--check"]) == 1
    assert "python -m tools.readme" in capsys.readouterr().err
    assert text_of(tmp_path) == "\n".join(SKELETONS)
    readme.main(arguments)
    assert readme.main([*arguments, "--check"]) == 0
    for page in readme.pages(tmp_path)[:2]:
        text = page.read_text()
        page.write_text(text.replace(readme.NOT_MEASURED, "touched by hand", 1))
        capsys.readouterr()
        assert readme.main([*arguments, "--check"]) == 1
        (complaint,) = capsys.readouterr().err.splitlines()
        assert str(page) in complaint
        page.write_text(text)
    store(tmp_path, cell("greedy", 8, 4.5))
    assert readme.main([*arguments, "--check"]) == 1


@pytest.mark.parametrize(
    ("pages", "parts", "message"),
    [
        (["<!-- speed -->\n"], ["speed"], "<!-- /speed -->"),
        (["<!-- speed -->\n<!-- /speed -->"] * 2, ["speed"], "<!-- /speed -->"),
        (["<!-- sped -->\n<!-- /sped -->"], [], "<!-- sped --> is no generated part"),
    ],
    ids=["missing", "on two pages", "unknown"],
)
def test_markers_that_do_not_stand_once_are_named(pages, parts, message):
    texts = {Path(f"{number}.md"): text for number, text in enumerate(pages)}
    with pytest.raises(ValueError, match=message):
        readme.rewritten(texts, dict.fromkeys(parts, "x"))


def test_the_dispatch_picture_names_and_reaches_every_mode():
    picture = readme.dispatch()
    modes = mode_table(151_936, "top_k")
    assert re.findall(r"<b>(.*)</b>", picture) == [mode.name for mode in modes]
    served = {readme.cheapest(modes, batch).name for batch in readme.BATCHES.values()}
    assert served == {mode.name for mode in modes}
    reached = {modes[0]}
    for small, large in readme.next_larger(modes):
        assert small in reached
        reached.add(large)
    assert reached == set(modes)


def test_the_pages_are_up_to_date():
    assert readme.main(["--check"]) == 0


RESULTS = ROOT / "tools" / "results"


def test_every_case_that_has_a_peer_has_a_line():
    found = pictures.lines(RESULTS)
    assert [len(line.rows) for line in found] == [5] * 7 + [3] * 2
    assert [line.num_drafts for line in found] == [0] * 7 + [3] * 2
    for line in found:
        assert list(line.rows) == sorted(line.rows)
        assert all(floor < us < peer for floor, us, peer in zip(line.floor_us, line.us, line.peer_us, strict=True))


def test_the_pictures_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    trees, speed = tmp_path / "trees.png", tmp_path / "folder" / "speed.png"
    pictures.draw_trees(json.loads((RESULTS / "trees.json").read_text())["records"], trees)
    pictures.draw(pictures.lines(RESULTS), speed)
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in (trees, speed))


def run(target, question, outcome="passed", device="cpu"):
    """A run of one question."""
    answered = {"question": question, "outcome": outcome, "detail": "", "power": "1%", "seconds": 2.0, "repeat": "x"}
    made = {"target": target, "device": device, "versions": {"torch": "2.0"}, "command": f"ask {question}"}
    return {**made, "results": [answered]}


def test_sections_of_a_target_are_one_column_of_last_answers_and_equal_ones_of_a_section_share_a_line():
    asked = [run("ours", name) for name in ("law.a", "law.b", "cost.c")]
    (column,) = merged([run("ours", "law.a", "failed"), *asked, run("ours", "law.d", "not asked")])
    assert [each["outcome"] for each in column["results"]] == ["passed"] * 3 + ["not asked"]
    lines = rendered({"runs": [column]}).splitlines()
    assert lines[2:5] == ["| `law.a`, `law.b` | yes |", "| `cost.c` | yes |", "| `law.d` | - |"]
    (column,) = merged([run("ours", "law.a"), run("ours", "cost.b", "failed")])
    text = rendered({"runs": [column]})
    assert "| `law.a` | yes |" in text
    assert "| `cost.b` | **no** |" in text
    assert "4 s; `ask law.a; ask cost.b`" in text
    assert len(merged([run("ours", "law.a"), run("theirs", "law.a"), run("ours", "law.a", device="cuda")])) == 3
