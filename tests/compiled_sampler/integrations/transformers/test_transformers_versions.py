"""Which versions of transformers are taken."""

import pytest

pytest.importorskip("transformers")

import transformers

from compiled_sampler.integrations.transformers.versions import CALLED, check_version

pytestmark = pytest.mark.full


@pytest.mark.parametrize("version", ["5.17.0", "5.24.1", "5.25.0.dev0", "6.0"])
def test_a_version_with_everything_that_is_called_is_taken(version: str) -> None:
    check_version(version, transformers.GenerationMixin)


@pytest.mark.parametrize("version", ["4.57.1", "5.0.0", "5.16.3"])
def test_an_older_version_is_refused_with_those_that_work(version: str) -> None:
    with pytest.raises(ImportError, match=r"must be 5.17 or newer, got .*; pip install 'transformers>=5.17,<=5.24'"):
        check_version(version, transformers.GenerationMixin)


@pytest.mark.parametrize("name", CALLED)
def test_a_newer_version_without_something_that_is_called_is_refused(name: str) -> None:
    methods = {each: getattr(transformers.GenerationMixin, each) for each in CALLED}
    lacking = type("Lacking", (), {key: value for key, value in methods.items() if key != name})
    with pytest.raises(ImportError, match=f"must have GenerationMixin.{name}"):
        check_version("5.99.0", lacking)
    if CALLED[name]:
        with pytest.raises(ImportError, match=f"must have GenerationMixin.{name}"):
            check_version("5.99.0", type("Other", (), {**methods, name: lambda self: None}))
