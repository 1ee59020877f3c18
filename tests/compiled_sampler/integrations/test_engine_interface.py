"""What an engine lacks is told from what fails while it is imported."""

import sys

import pytest

from compiled_sampler.integrations import tokenspeed
from compiled_sampler.integrations.engine_interface import Interface, Supported, differences, found

INTERFACE = Interface(parameters={"an_engine.parts.drawing:Drawer.draw": ("self", "logits")})


@pytest.fixture
def engine(tmp_path, monkeypatch):
    (tmp_path / "an_engine" / "parts").mkdir(parents=True)
    for folder in ("an_engine", "an_engine/parts"):
        (tmp_path / folder / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("an_engine", "an_engine.parts", "an_engine.parts.drawing"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path / "an_engine" / "parts" / "drawing.py"


@pytest.mark.parametrize(
    "source",
    [None, "x = 1", "class Drawer: pass", "class Drawer:\n    def draw(self, rows): pass"],
    ids=["no module", "no class", "no method", "other parameters"],
)
def test_what_an_engine_lacks_is_a_difference(engine, source):
    if source is not None:
        engine.write_text(source)
    assert differences(INTERFACE, found) == [*INTERFACE.parameters]
    with pytest.raises(ImportError, match=r"an engine must have an_engine\.parts\.drawing:Drawer\.draw, got 1\.0"):
        Supported("an engine", "1.0", "install another", INTERFACE).check("1.0")


def test_an_engine_that_has_everything_is_taken(engine):
    engine.write_text("class Drawer:\n    def draw(self, logits): pass")
    assert differences(INTERFACE, found) == []


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("import a_library_that_is_not_there", ModuleNotFoundError, "a_library_that_is_not_there"),
        ("raise ImportError('libcuda.so.1: cannot open')", ImportError, "libcuda"),
        ("import math\nmath.nothing", AttributeError, "nothing"),
    ],
    ids=["its library", "its binary", "its code"],
)
def test_what_fails_in_an_engines_own_import_is_let_through(engine, source, error, message):
    engine.write_text(source)
    with pytest.raises(error, match=message):
        differences(INTERFACE, found)


def test_the_adapter_that_left_ends_the_process_that_asks_for_it_and_no_other(monkeypatch):
    monkeypatch.delenv(tokenspeed.VARIABLE, raising=False)
    tokenspeed.load()
    monkeypatch.setenv(tokenspeed.VARIABLE, "triton")
    with pytest.raises(SystemExit, match="COMPILED_SAMPLER_TOKENSPEED is set, but the adapter of TokenSpeed has left"):
        tokenspeed.load()
