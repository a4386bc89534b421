"""The published names over gloo, used as their documentation says, against dense fp64."""

import pytest

from tests.magi_attention import api_jobs as jobs
from tests.process_pool import pool

WORLD = 5


@pytest.mark.parametrize("cp_size", [1, 2, 3, 5])
def test_random_type_coded_masks(cp_size: int) -> None:
    pool(WORLD).run(jobs.random_types, cp_size, list(range(100 * cp_size, 100 * cp_size + 8)))


@pytest.mark.parametrize("use_flex", [False, True], ids=["varlen", "flex"])
@pytest.mark.parametrize("cp_size", [2, 3])
def test_key_dispatch_projections_attention_undispatch(cp_size: int, use_flex: bool) -> None:
    pool(WORLD).run(jobs.train_step, cp_size, use_flex)


@pytest.mark.parametrize("cp_size", [2, 5])
def test_a_second_mask_on_one_dispatch(cp_size: int) -> None:
    pool(WORLD).run(jobs.second_mask, cp_size)


@pytest.mark.parametrize("cp_size", [2, 3, 5])
def test_roll_for_multi_token_prediction(cp_size: int) -> None:
    pool(WORLD).run(jobs.multi_token_prediction, cp_size)


@pytest.mark.parametrize("cp_size", [2, 3])
def test_replicated_sink(cp_size: int) -> None:
    pool(WORLD).run(jobs.replicated_sink, cp_size)


@pytest.mark.parametrize("cp_size, degree", [(1, 0), (2, 0), (3, 2), (5, None)])
def test_max_logits(cp_size: int, degree: int | None) -> None:
    pool(WORLD).run(jobs.max_logits, cp_size, degree)


def test_meshes() -> None:
    pool(4).run(jobs.meshes, 4)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_old_dispatch_calls() -> None:
    pool(WORLD).run(jobs.old_dispatch_calls, 2)
