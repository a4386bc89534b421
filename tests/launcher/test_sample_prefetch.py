"""Samples that are read before their microbatch comes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron_magi.launcher.sample_prefetch import NUM_AHEAD, DrawnAhead
from tests.launcher.one_rank import launch_of
from tests.launcher.test_samples import LENGTH


def test_samples_keep_their_order_and_are_seen_ahead() -> None:
    seen: list[int] = []
    drawn = DrawnAhead(iter(range(6)), seen.append)
    for i in range(6):
        assert next(drawn) == i
        assert seen == list(range(min(6, i + 1 + NUM_AHEAD)))


@pytest.mark.parametrize("count", [0, 1, NUM_AHEAD, NUM_AHEAD + 3])
def test_data_ends_where_it_ended(count: int) -> None:
    drawn = DrawnAhead(iter(range(count)), lambda sample: None)
    assert list(drawn) == list(range(count))
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(drawn)


def test_an_error_of_the_loader_comes_in_the_place_of_its_sample() -> None:
    class Loader:
        place = 0

        def __next__(self) -> int:
            self.place += 1
            if self.place == 2:
                raise OSError("a bad sample")
            return self.place

    drawn = DrawnAhead(Loader(), lambda sample: None)  # type: ignore[arg-type]
    assert next(drawn) == 1
    with pytest.raises(OSError, match="a bad sample"):
        next(drawn)
    assert next(drawn) == 3


def test_a_sample_that_cannot_be_read_is_an_error_in_its_place() -> None:
    def see(sample: int) -> None:
        if sample == 2:
            raise ValueError("no documents in it")

    drawn = DrawnAhead(iter(range(4)), see)
    assert [next(drawn), next(drawn)] == [0, 1]
    with pytest.raises(ValueError, match="no documents in it"):
        next(drawn)
    assert next(drawn) == 3


def test_an_external_loader_keeps_its_position() -> None:
    """Megatron saves it through the iterator that the launcher looks ahead in."""
    external = launch_of(LENGTH, dataloader_inter_document_masking=True, dataloader_type="external")
    assert not external.plans_ahead()
    loader = SimpleNamespace(save_state=lambda: "place")
    assert DrawnAhead(loader, lambda sample: None, 0).save_state() == "place"  # type: ignore[arg-type]
