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

# pip's own warnings (-qq) are about its configuration and the PATH; its errors are shown.
pip_install() { "$venv/bin/python" -m pip install -qq --disable-pip-version-check "$@"; }

# Without a GPU the CPU build of 0.2 GB; what PyPI has for Linux brings CUDA and is several GB.
install_torch() {
  "$venv/bin/python" -c "$has_torch" 2>/dev/null && return
  local cpu_builds=https://download.pytorch.org/whl/cpu
  if command -v nvidia-smi >/dev/null; then
    echo "installing torch $torch_pin with CUDA, several GB"
  elif answers "$cpu_builds/torch/"; then
    echo "installing torch $torch_pin for the CPU, 0.2 GB: there is no nvidia-smi here"
    pip_install "torch==$torch_pin" --index-url "$cpu_builds" --retries 1 --timeout 15 && return
    echo "that failed; PyPI's torch $torch_pin is installed, which may be several GB"
  else
    echo "installing PyPI's torch $torch_pin, which may be several GB: $cpu_builds does not answer"
  fi
  pip_install "torch==$torch_pin"
}
# Within seconds, with any status. Certificates are pip's business.
answers() { # URL
  timeout 8 "$venv/bin/python" -c 'import ssl, sys, urllib.error, urllib.request as r
head = r.Request(sys.argv[1], method="HEAD")
try: r.urlopen(head, timeout=5, context=ssl._create_unverified_context())
except urllib.error.HTTPError: pass' "$1"
} 2>/dev/null

# What decides whether an environment is up to date: these files, and C++ sources not newer than it.
state() { cat pyproject.toml setup.py scripts/setup_env.sh | cksum; }
is_ready() {
  [ -f "$ready" ] && [ "$(cat "$ready")" = "$(state)" ] &&
    [ -z "$(find megatron_magi/csrc -newer "$ready")" ] && is_there
}
# Found, not imported, which takes seconds and was done when the environment was made.
is_there() { "$venv/bin/python" -c 'import os
from importlib import machinery, util
solver = any(os.path.exists(f"megatron_magi/_solver{end}") for end in machinery.EXTENSION_SUFFIXES)
raise SystemExit(not (solver and util.find_spec("torch") and util.find_spec("megatron.core")))'; } 2>/dev/null
# The adapter stands in for what 0.19.2 imports of Triton, which a CPU build of torch lacks.
imports() { "$venv/bin/python" -c 'import megatron_magi._solver, megatron_magi.adapter, torch'; } 2>/dev/null

ready="$venv/.ready-$extra"
is_ready && exit 0
[ -x "$venv/bin/python" ] || make_venv
"$venv/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  fail "Python 3.11 or later is required in $venv, got an older one; remove that folder"
megatron_pin=0.19.2
echo "installing megatron_magi[$extra] and megatron-core $megatron_pin"
echo "meanwhile the C++ planner is compiled, once and silently: about two to four minutes"
pip_install --no-deps -e . &
planner=$!
trap 'kill "$planner" 2>/dev/null || true' EXIT
install_torch
pip_install --ignore-requires-python --only-binary=:all: "megatron-core==$megatron_pin"
wait "$planner"
# It is there, so this installs what the extra asks for.
pip_install "megatron-magi[$extra]"
imports || fail "the environment $venv does not import what it needs; remove it and start again"
state >"$ready"
