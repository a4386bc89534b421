"""What rank 0 does for all: its result on every rank, or its error on every rank."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest

from megatron_magi.training.checkpoint.checkpoint_facts import DamagedCheckpointError
from megatron_magi.training.process import rank_0
from megatron_magi.training.recipe.recipe_error import RecipeError


class World:
    """Rank 0 and a rank after it, one after the other; what is sent goes through pickle."""

    def __init__(self) -> None:
        self.rank, self.sent = 0, b""

    def get_rank(self) -> int:
        return self.rank

    def broadcast_object_list(self, answer: list[Any], src: int) -> None:
        assert src == 0
        if self.rank == 0:
            self.sent = pickle.dumps(answer)
        answer[:] = pickle.loads(self.sent)

    def on_both(self, make: Callable[[], Any]) -> list[Any]:
        """What each rank returns or raises."""
        found: list[Any] = []
        for self.rank in (0, 1):
            try:
                found.append(rank_0.from_rank_0(make))
            except Exception as error:
                found.append(error)
        return found


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    monkeypatch.setattr(rank_0, "dist", made)
    return made


def failing(error: Exception) -> Callable[[], Any]:
    def make() -> Any:
        raise error

    return make


@pytest.mark.parametrize("result", [7, None, {"path": "x"}])
def test_only_rank_0_makes_the_result_of_all(world: World, result: Any) -> None:
    made_by: list[int] = []

    def make() -> Any:
        made_by.append(world.rank)
        return result

    assert world.on_both(make) == [result, result] and made_by == [0]


def test_an_error_for_the_user_is_the_same_on_all(world: World) -> None:
    for kind in (RecipeError, DamagedCheckpointError):
        found = world.on_both(failing(kind("mend the recipe")))
        assert [(type(e), str(e)) for e in found] == [(kind, "mend the recipe")] * 2


def test_an_error_of_the_system_says_what_to_do_on_all(world: World) -> None:
    found = world.on_both(failing(PermissionError(13, "Permission denied", "runs")))
    assert [type(e) for e in found] == [RecipeError] * 2 and str(found[0]) == str(found[1])
    assert "got [Errno 13] Permission denied: 'runs'; see to permissions" in str(found[0])
    assert isinstance(found[0].__cause__, PermissionError)


def test_a_mistake_of_ours_keeps_its_traceback_on_rank_0(world: World) -> None:
    mistake = KeyError("w")
    first, second = world.on_both(failing(mistake))
    assert first is mistake
    assert type(second) is RecipeError and "got KeyError: 'w'; its own output" in str(second)
