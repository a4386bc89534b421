"""Finding, building once and loading the CUDA library, without a GPU."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

from megatron_magi import build
from megatron_magi.core.cuda.abi import CudaKernelError, FwdParams
from megatron_magi.core.cuda.library import CudaLibrary
from tests.process_pool import forking_context


def test_without_nvcc_the_error_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    monkeypatch.setattr(build.os, "access", lambda path, mode: False)
    with pytest.raises(build.CudaBuildError, match="install the CUDA toolkit, copy a built"):
        build.find_nvcc()


def fake_nvcc(directory: Path) -> Path:
    """Counts links; 'compiles' by touching the output."""
    script = directory / "nvcc"
    script.write_text(
        "#!/bin/sh\n"
        'case "$*" in *--version*) echo release 13.0; exit 0;; esac\n'
        f'case "$*" in *-shared*) echo link >> {directory}/links; sleep 0.3;; esac\n'
        'while [ "$1" != "-o" ]; do shift; done; touch "$2"\n'
    )
    script.chmod(0o755)
    return script


def build_there(directory: str) -> str:
    return str(build.build(Path(directory) / "lib" / "lib.so", f"{directory}/nvcc"))


def test_several_processes_build_once(tmp_path: Path) -> None:
    fake_nvcc(tmp_path)
    with forking_context().Pool(4) as pool:
        paths = pool.map(build_there, [str(tmp_path)] * 4)
    assert set(paths) == {str(tmp_path / "lib" / "lib.so")} and Path(paths[0]).exists()
    assert (tmp_path / "links").read_text().count("link") == 1


def test_a_failing_compiler_is_quoted(tmp_path: Path) -> None:
    script = tmp_path / "nvcc"
    script.write_text("#!/bin/sh\necho 'no such arch sm_90a' >&2\nexit 1\n")
    script.chmod(0o755)
    with pytest.raises(build.CudaBuildError, match=r"(?s)exit code 1.*no such arch sm_90a"):
        build.build(tmp_path / "lib.so", str(script))


@pytest.mark.parametrize("jobs", ["two", "0", "-1", "2.5"])
def test_max_jobs_is_a_number(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, jobs: str) -> None:
    monkeypatch.setenv("MAX_JOBS", jobs)
    with pytest.raises(build.CudaBuildError, match=rf"must be a whole number .*, got '{jobs}'; un"):
        build.build(tmp_path / "lib.so", str(fake_nvcc(tmp_path)))


def test_the_key_follows_the_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = build._sources_key()
    (tmp_path / "a.cu").write_text("int a;")
    monkeypatch.setattr(build, "SOURCE_DIR", tmp_path)
    first = build._sources_key()
    (tmp_path / "a.cu").write_text("int b;")
    assert len({before, first, build._sources_key()}) == 3


def test_the_compiler_of_cuda_home_comes_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    in_home, on_path = tmp_path / "home" / "bin", tmp_path / "path"
    for folder in (in_home, on_path):
        folder.mkdir(parents=True)
        fake_nvcc(folder)
    monkeypatch.setenv("PATH", str(on_path))
    monkeypatch.setenv("CUDA_HOME", str(in_home.parent))
    assert build.find_nvcc() == str(in_home / "nvcc")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nowhere"))
    assert build.find_nvcc() == str(on_path / "nvcc")


def test_without_a_compiler_a_library_of_these_very_sources_is_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def find_nvcc() -> str:
        raise build.CudaBuildError("got no nvcc")

    monkeypatch.setattr(build, "find_nvcc", find_nvcc)
    monkeypatch.setenv("MAGI_BUILD_DIR", str(tmp_path))
    (tmp_path / "libmagi_attention-0123456789ab-0123456789ab.so").touch()
    assert build.main([]) == 1
    assert capsys.readouterr() == ("", "got no nvcc\n")
    older, newer = (tmp_path / f"libmagi_attention-{build._sources_key()}-{n}.so" for n in "ab")
    for age, path in ((20, older), (10, newer)):
        path.touch()
        os.utime(path, (path.stat().st_mtime - age,) * 2)
    assert build.library_path() == newer


def test_a_library_of_these_sources_is_taken_before_a_compiler_is_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a wheel brings it, built by another compiler; --force builds with the one of here."""
    (tmp_path / "bin").mkdir()
    fake_nvcc(tmp_path / "bin")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("MAGI_BUILD_DIR", str(tmp_path / "libs"))
    unit = build.sources()[0]
    monkeypatch.setattr(build, "sources", lambda: [unit])
    carried = tmp_path / "libs" / f"libmagi_attention-{build._sources_key()}-0123456789ab.so"
    carried.parent.mkdir()
    carried.touch()
    assert build.library_path() == carried and not (tmp_path / "bin" / "links").exists()
    assert build.main(["--force"]) == 0
    built = Path(capsys.readouterr().out.strip())
    assert built != carried and built.parent == carried.parent
    assert (tmp_path / "bin" / "links").read_text() == "link\n"


@pytest.mark.slow
def test_the_library_builds_and_loads_without_a_gpu() -> None:
    try:
        build.find_nvcc()
    except build.CudaBuildError:
        pytest.skip("needs nvcc")
    path = build.library_path()
    library = CudaLibrary(path)
    exported = subprocess.run(["nm", "-D", str(path)], capture_output=True, text=True).stdout
    assert "magi_attn_fwd" in exported and "libcudart" not in exported
    with pytest.raises(RuntimeError, match="num_heads_q must be a multiple of num_heads_kv"):
        library.call("magi_attn_fwd", FwdParams(num_heads_q=3, num_heads_kv=2, pack=1))
    log = path.with_suffix(".log")
    if log.exists():  # the assembler named every kernel that it compiled
        compiled = re.findall(r"Compiling entry function '(\w+)'", log.read_text())
        assert library.handle.magi_num_kernels() == len(set(compiled)) > 30
    if not torch.cuda.is_available():
        with pytest.raises(CudaKernelError, match=r"magi_load_kernels failed.*loading the"):
            library.load_kernels(torch.bfloat16)
