"""The examples of docs/transformers.md run; the other pages, which need no transformers, are run by test_docs.py."""

import re

import pytest

pytest.importorskip("transformers")

from tools.readme import ROOT

pytestmark = pytest.mark.full


def test_the_examples_of_the_page_run() -> None:
    page = ROOT / "docs" / "transformers.md"
    blocks = re.findall(r"^```py\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 2
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, page.name, "exec"), names)
