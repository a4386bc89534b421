"""Builds the CUDA library (plain C ABI, no torch headers) once per source and compiler.

    python -m megatron_magi.build            # build if needed, print the path
    python -m megatron_magi.build --force    # build again, with the compiler of this machine
    python -m megatron_magi.build --log      # print what ptxas said about registers and spills

The result lies in ``megatron_magi.libs`` next to the package or, where that is not writable, in the
user's cache; its name holds a hash of the sources, the flags and the compiler's version. A library
of these very sources is taken wherever it was built: a wheel that is made where there is one has it
(setup.py). A file lock makes several processes build once. Build variables: CUDA_HOME (where nvcc
is), MAX_JOBS, MAGI_BUILD_DIR.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

logger = logging.getLogger("megatron_magi")

SOURCE_DIR = Path(__file__).parent / "csrc" / "attention"
FLAGS = [
    *("-O3", "-std=c++17", "-gencode", "arch=compute_90a,code=sm_90a"),
    *("-Xcompiler", "-fPIC,-fvisibility=hidden", "-Xptxas", "-v"),
]
LINK_FLAGS = ["-shared", "-cudart", "static", "-Xlinker", "-Bsymbolic"]


class CudaBuildError(RuntimeError):
    """The CUDA library is not there and cannot be built here; the message says what to do."""


def sources() -> list[Path]:
    """Every translation unit of the library."""
    units = [*SOURCE_DIR.rglob("*.cpp"), *SOURCE_DIR.rglob("*.cu")]
    return sorted(p for p in units if "tests" not in p.parts)


def find_nvcc() -> str:
    """Path of nvcc.

    Raises:
        CudaBuildError: there is none.
    """
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    candidates = [f"{home}/bin/nvcc"] if home else []
    candidates += [shutil.which("nvcc") or "", "/usr/local/cuda/bin/nvcc"]
    for path in candidates:
        if path and os.access(path, os.X_OK):
            return path
    raise CudaBuildError(
        "the Hopper kernels need nvcc 12.3 or newer to be built, got no nvcc in CUDA_HOME, PATH or "
        "/usr/local/cuda; install the CUDA toolkit, copy a built megatron_magi.libs here, or use "
        "the backend 'flex'"
    )


def library_path() -> Path:
    """The library for these sources, built if it is not there yet.

    Raises:
        CudaBuildError: no compiler, or the compiler failed (with its message).
    """
    ready = built_library()
    return build_here() if ready is None else ready


def build_here(force: bool = False) -> Path:
    """The library as this machine's compiler makes it, built unless it is there.

    Raises:
        CudaBuildError: no compiler, or the compiler failed (with its message).
    """
    compiler = find_nvcc()
    name = f"libmagi_attention-{_sources_key()}-{_key(_run([compiler, '--version']))}.so"
    return build(_writable_directory() / name, compiler, force)


def build(target: Path, compiler: str, force: bool = False) -> Path:
    """Compile and link to ``target`` unless another process has done so meanwhile."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.with_suffix(".lock")):
        if target.exists() and not force:
            return target
        units = sources()
        given = os.environ.get("MAX_JOBS") or str(min(os.cpu_count() or 1, len(units)))
        if not given.isdecimal() or int(given) == 0:
            raise CudaBuildError(
                f"MAX_JOBS must be a whole number of 1 or more, got {given!r}; unset or change it"
            )
        jobs = int(given)
        logger.warning(
            "building the CUDA library once: %d files with %s, %d at a time, into %s",
            len(units), compiler, jobs, target,
        )  # fmt: skip
        begin = time.monotonic()
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            log = _compile(units, compiler, Path(scratch), jobs)
            part = Path(scratch) / target.name
            objects = [str(p) for p in sorted(Path(scratch).glob("*.o"))]
            _run([compiler, *LINK_FLAGS, *objects, "-o", str(part)])
            target.with_suffix(".log").write_text(log)
            os.replace(part, target)  # atomic: nobody loads half a library
        logger.warning("built %s in %.0f s", target.name, time.monotonic() - begin)
    return target


def _compile(units: list[Path], compiler: str, scratch: Path, jobs: int) -> str:
    def one(unit: Path) -> str:
        name = "_".join(unit.relative_to(SOURCE_DIR).parts) + ".o"
        return f"== {name}\n" + _run([compiler, *FLAGS, "-c", str(unit), "-o", str(scratch / name)])

    with ThreadPoolExecutor(jobs) as pool:
        return "".join(pool.map(one, units))


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise CudaBuildError(
            f"nvcc must compile the kernels, got exit code {done.returncode} from "
            f"`{' '.join(command)}`:\n{done.stderr.strip()}\nCUDA 12.3 or newer is needed"
        )
    return done.stdout + done.stderr


def _key(*parts: str | bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part if isinstance(part, bytes) else part.encode())
    return digest.hexdigest()[:12]


def _sources_key() -> str:
    files = sorted(p for p in SOURCE_DIR.rglob("*") if p.suffix in (".h", ".cuh", ".cu", ".cpp"))
    parts: list[str | bytes] = [*FLAGS, *LINK_FLAGS]
    for path in files:
        parts += [str(path.relative_to(SOURCE_DIR)), path.read_bytes()]
    return _key(*parts)


def _directories() -> list[Path]:
    given = os.environ.get("MAGI_BUILD_DIR")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron_magi"
    # Not in the package's folder: pip leaves behind what it did not install, and Python takes a
    # folder with nothing else in it for an empty package of this name.
    next_to_package = Path(__file__).parent.with_name("megatron_magi.libs")
    return [Path(given)] if given else [next_to_package, cache]


def _writable_directory() -> Path:
    for directory in _directories():
        with contextlib.suppress(OSError):
            directory.mkdir(parents=True, exist_ok=True)
            if os.access(directory, os.W_OK):
                return directory
    raise CudaBuildError(
        f"a writable directory is needed for the CUDA library, got none of "
        f"{[str(d) for d in _directories()]}; set MAGI_BUILD_DIR"
    )


def built_library() -> Path | None:
    """The newest library of these very sources, built here or elsewhere; None: there is none."""
    found = [p for d in _directories() for p in d.glob(f"libmagi_attention-{_sources_key()}-*.so")]
    return max(found, key=lambda p: p.stat().st_mtime, default=None)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Held by one process at a time; threading's locks know only their own process."""
    with open(path, "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(handle, fcntl.LOCK_UN)


def main(argv: list[str] | None = None) -> int:
    """Command line: see the module."""
    parser = argparse.ArgumentParser(description="Build the CUDA library of megatron_magi.")
    parser.add_argument("--force", action="store_true", help="build even if it is there")
    parser.add_argument("--log", action="store_true", help="print the log of ptxas")
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        path = build_here(force=True) if options.force else library_path()
    except CudaBuildError as error:
        print(error, file=sys.stderr)
        return 1
    print(path)
    if options.log and path.with_suffix(".log").exists():
        print(path.with_suffix(".log").read_text())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
