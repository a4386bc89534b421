#!/usr/bin/env bash
# Makes a virtual environment with this package, one of its extras, torch and megatron-core.
#   bash scripts/setup_env.sh VENV EXTRA        e.g. .venv quickstart
# Needs Python 3.11 or later, best 3.12, with pip and venv (pyenv's too), and a C++20 compiler. A torch (2.6 or later) that
# python3 already imports is used as it is; otherwise the pinned one is installed.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${1:-.venv}
extra=${2:-quickstart}
torch_pin=2.13.0

fail() { printf 'error: %s\n' "$1" >&2; exit 2; }

# Megatron-core 0.19.2 asks for Python 3.12. Its wheel works on 3.11 too.
find_python() {
  local candidate
  # The one that the user has activated comes first; 3.11 serves as well as 3.12.
  for candidate in python3 python3.12 python3.13 python3.11 "$HOME"/.pyenv/versions/3.1[123]*/bin/python; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  fail "Python 3.11 or later is required, got $(python3 --version 2>&1 || echo none); install one"
}

has_torch='import torch, sys; sys.exit(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 6))'

make_venv() {
  local python
  python=$(find_python)
  command -v c++ >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null ||
    fail "a C++20 compiler is needed for the planner, got none; install g++ 10 or clang 12 or later"
  if "$python" -c "$has_torch" 2>/dev/null; then
    echo "environment: $venv, with the torch that $python already has"
    "$python" -m venv --system-site-packages "$venv"
    # In an activated virtual environment, torch stands in that one and not in the system's packages.
    "$python" -c 'import sys, sysconfig; p = sysconfig.get_paths()
if sys.prefix != sys.base_prefix: print(p["purelib"], p["platlib"], sep="\n")' \
      >"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/parent.pth"
  else
    echo "environment: $venv, new"
    "$python" -m venv "$venv"
  fi
}

# Without a GPU the CPU build of 0.2 GB; what PyPI has for Linux brings CUDA and is several GB.
install_torch() {
  "$venv/bin/python" -c "$has_torch" 2>/dev/null && return
  local install=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check "torch==$torch_pin")
  if command -v nvidia-smi >/dev/null; then
    echo "installing torch $torch_pin with CUDA, several GB"
  else
    echo "installing torch $torch_pin for the CPU: there is no nvidia-smi here"
    "${install[@]}" --quiet --index-url https://download.pytorch.org/whl/cpu --retries 1 --timeout 15 && return
    echo "PyTorch's own server cannot be reached; PyPI's build is taken, which may be several GB"
  fi
  "${install[@]}"
}

# What decides whether an environment is up to date: these files, and C++ sources not newer than it.
state() { cat pyproject.toml setup.py scripts/setup_env.sh | cksum; }
is_ready() {
  [ -f "$ready" ] && [ "$(cat "$ready")" = "$(state)" ] &&
    [ -z "$(find megatron_magi/csrc -newer "$ready")" ] && imports
}
# The adapter stands in for what 0.19.2 imports of Triton, which a CPU build of torch lacks.
imports() { "$venv/bin/python" -c 'import megatron_magi._solver, megatron_magi.adapter, torch'; } 2>/dev/null

ready="$venv/.ready-$extra"
is_ready && exit 0
[ -x "$venv/bin/python" ] || make_venv
"$venv/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  fail "Python 3.11 or later is required in $venv, got an older one; remove that folder"
install_torch
megatron_pin=0.19.2
echo "installing megatron_magi[$extra] and megatron-core $megatron_pin"
echo "then the C++ planner is compiled, once and silently: about two to four minutes"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
  -e ".[$extra]"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --ignore-requires-python \
  --only-binary=:all: "megatron-core==$megatron_pin"
imports || fail "the environment $venv does not import what it needs; remove it and start again"
state >"$ready"
