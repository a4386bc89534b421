"""``import magi_attention`` after install(): its modules, and what is refused."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_magi import magi_attention as ours
from megatron_magi.magi_attention import import_hook


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """No module of that name stays for other tests."""
    yield
    for name in [n for n in sys.modules if n.split(".")[0] == import_hook.PUBLISHED]:
        del sys.modules[name]
    importlib.invalidate_caches()


def test_nothing_is_there_before_the_call() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("magi_attention.api")


def test_published_imports_are_ours() -> None:
    ours.install()
    ours.install()
    names: dict[str, object] = {}
    exec(
        "import magi_attention\n"
        "from magi_attention.api import calc_attn, dispatch, magi_attn_flex_key, undispatch\n"
        "from magi_attention.api.functools import compute_pad_size, squash_batch_dim\n"
        "from magi_attention.common import AttnRange, AttnRanges\n"
        "from magi_attention.common.enum import AttnMaskType, AttnOverlapMode\n"
        "from magi_attention.common.ranges import AttnRanges as again\n"
        "from magi_attention.config import DistAttnConfig, DispatchConfig, OverlapConfig\n"
        "from magi_attention.functional import flex_flash_attn_func\n",
        names,
    )
    assert names["magi_attention"].__version__ == ours.MAGI_ATTENTION_VERSION  # type: ignore[attr-defined]
    assert names["again"] is names["AttnRanges"]
    for name in set(names) & set(ours.__all__):
        assert names[name] is getattr(ours, name)


@pytest.mark.parametrize("path", import_hook.LAYOUT)
def test_every_module_can_be_imported(path: str) -> None:
    ours.install()
    module = importlib.import_module(f"magi_attention.{path}")
    assert module.__all__ or import_hook.LAYOUT[path] == ()
    assert all(getattr(ours, n) is getattr(module, n) for n in module.__all__)


def test_what_is_not_here_is_said() -> None:
    ours.install()
    with pytest.raises(ImportError, match=r"torch\.nn\.functional\.pad"):
        exec("from magi_attention.api.functools import pad_at_dim")
    with pytest.raises(AttributeError, match=r"got 'no_such'; see docs/guides/migrating\.md"):
        _ = importlib.import_module("magi_attention.api").no_such
    with pytest.raises(AttributeError, match=r"import it from magi_attention\.api"):
        _ = importlib.import_module("magi_attention.common").calc_attn
    with pytest.raises(ModuleNotFoundError, match="utils"):
        importlib.import_module("magi_attention.utils.sparse_utils")


def test_an_installed_package_is_not_shadowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "magi_attention").mkdir()
    (tmp_path / "magi_attention" / "__init__.py").write_text("real = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="name magi_attention to be free"):
            ours.install()
        assert importlib.import_module("magi_attention").real  # imported for the second round
