"""Which megatron-core versions are taken."""

from __future__ import annotations

import pytest
import torch

from megatron_magi.adapter import MEGATRON_VERSION, compat
from megatron_magi.adapter.compat import MegatronVersion


def test_installed_version_is_supported() -> None:
    assert compat.installed_version() == MEGATRON_VERSION
    assert MEGATRON_VERSION[:2] in compat.SUPPORTED_MINORS


@pytest.mark.parametrize("version", [(0, 16, 1), (0, 17, 1), (0, 21, 0), (1, 0, 0)])
def test_unknown_versions_are_refused(
    version: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "installed_version", lambda: MegatronVersion(*version))
    text = ".".join(map(str, version))
    with pytest.raises(ImportError, match=rf"requires megatron-core 0.18 to 0.20, got {text}"):
        compat.require_megatron()


def test_missing_megatron_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "installed_version", lambda: None)
    with pytest.raises(ImportError, match=r"got none; put a Megatron-LM checkout first"):
        compat.require_megatron()


@pytest.mark.parametrize("version, needs", [((0, 18, 2), True), ((0, 19, 2), False)])
def test_triton_is_asked_for_where_megatron_imports_it(
    version: tuple[int, int, int], needs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "installed_version", lambda: MegatronVersion(*version))
    monkeypatch.setattr(compat.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(compat, "_stub_paged_stash", lambda: None)
    monkeypatch.setattr(compat, "_define_override", lambda: None)
    if needs:
        with pytest.raises(ImportError, match="requires triton at import"):
            compat.require_megatron()
    else:
        compat.require_megatron()


@pytest.mark.parametrize("disabled", ["0", "1"])
def test_a_disabled_compiler_leaves_functions_alone(
    monkeypatch: pytest.MonkeyPatch, disabled: str
) -> None:
    def compiler(*args: object, **options: object) -> None: ...

    def double(x: int) -> int:
        return 2 * x

    monkeypatch.setattr(torch, "compile", compiler)
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", disabled)
    compat.require_megatron()
    if disabled == "0":
        assert torch.compile is compiler
        return
    assert torch.compile(double, dynamic=True) is double
    assert torch.compile(fullgraph=True)(double) is double
