#!/usr/bin/env bash
# Runs the launcher's tests on Megatron-LM source trees: pretrain scripts as they are, on the CPU.
#   bash scripts/test_megatron.sh CHECKOUT [CHECKOUT ...]      e.g. trees of core_v0.18.2, core_v0.19.0
# Each tree takes about five minutes on two cores. RECORDS=FOLDER keeps the losses of all runs there.
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -gt 0 ] || { echo "usage: bash scripts/test_megatron.sh CHECKOUT [CHECKOUT ...]" >&2; exit 2; }

bash scripts/setup_env.sh .venv dev
export PATH=$PWD/.venv/bin:$PATH
suffix=$(python -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
for checkout; do
  [ -f "$checkout/pretrain_gpt.py" ] || { echo "error: no pretrain_gpt.py in $checkout" >&2; exit 2; }
  checkout=$(cd "$checkout" && pwd)
  version=$(cd "$checkout" && python -c 'import runpy; v = runpy.run_path(
    "megatron/core/package_info.py"); print(*v["VERSION"][:3], sep=".")')
  echo "== Megatron-LM $version in $checkout"
  if ! python -c 'import triton' 2>/dev/null; then
    case $version in 0.18.* | 0.20.*) python -m pip install --quiet triton ;; esac
  fi
  make --silent -C "$checkout/megatron/core/datasets" LIBEXT="$suffix" CPPFLAGS="$(python -m pybind11 --includes)"
  python scripts/check_hooks.py --megatron "$checkout"
  record=()
  [ -z "${RECORDS:-}" ] || record=(--losses-record "$RECORDS/launcher_cpu_$(date +%F)_$version.json")
  python -m pytest -q -m megatron_checkout tests/launcher tests/test_patches.py \
    --megatron-checkout "$checkout" "${record[@]}"
done
