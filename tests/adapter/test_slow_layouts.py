"""Every slow layout is a case of its file, and faster ones are left."""

from __future__ import annotations

import importlib

import pytest

from tests.adapter.slow_layouts import SLOW_LAYOUTS


@pytest.mark.parametrize("file", SLOW_LAYOUTS)
def test_each_is_a_case_and_not_all_are(file: str) -> None:
    module = importlib.import_module(f"tests.adapter.{file.removesuffix('.py')}")
    lists = [x for x in vars(module).values() if isinstance(x, list)]
    cases = {case.id for some in lists for case in some if hasattr(case, "id")}
    assert SLOW_LAYOUTS[file] < cases
