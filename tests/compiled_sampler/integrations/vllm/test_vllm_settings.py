"""Settings of the adapter, and how they travel to other processes."""

import pytest

from compiled_sampler.integrations.vllm.settings import Settings, from_text


@pytest.mark.parametrize("text", ["", "0"])
def test_nothing_and_zero_are_off(text: str) -> None:
    assert from_text(text) is None


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (Settings(), "1"),
        (Settings(rule="block"), "rule=block"),
        (Settings(v2="untested"), "v2=untested"),
        (Settings(warmup="off"), "warmup=off"),
        (Settings("stock", "rejection", "eager"), "on_unsupported=stock,rule=rejection,backend=eager"),
    ],
)
def test_settings_come_back_from_their_text(settings: Settings, text: str) -> None:
    assert settings.text == text
    assert from_text(text) == settings


@pytest.mark.parametrize("text", ["yes", "rule=fast", "speed=1", "rule"])
def test_another_text_is_refused_with_the_choices(text: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        from_text(text)
