"""Variables for debugging."""

import pytest

from megatron_magi import debug


@pytest.mark.parametrize("level", ["verbose", "10", " "])
def test_a_level_of_the_log_is_one_of_loggings(monkeypatch: pytest.MonkeyPatch, level: str) -> None:
    monkeypatch.setenv("MAGI_DEBUG_LOG", level)
    with pytest.raises(ValueError, match=r"MAGI_DEBUG_LOG must be 'DEBUG', 'INFO', .*; use one of"):
        debug.setup_logging()
