#!/usr/bin/env bash
# Builds the documentation as a site under build/site, from docs/, README.md and CONTRIBUTING.md.
#   bash tools/build_site.sh [ADDRESS]   then open build/site/index.html; ADDRESS: of the
#                                          repository, for links to sources; without one they
#                                          lead to this checkout
set -euo pipefail
cd "$(dirname "$0")/.."

[ -x .venv/bin/python ] || bash scripts/setup_env.sh .venv dev
venv=build/site_venv
"$venv/bin/python" -c 'import material, mkdocstrings_handlers.python' 2>/dev/null || {
  python3 -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
    'mkdocs-material>=9.5,<10' 'mkdocstrings[python]>=1,<2' ruff
}
.venv/bin/python -m tools.site_pages build/site_pages "$@"
NO_MKDOCS_2_WARNING=1 "$venv/bin/mkdocs" build --quiet --strict
echo "built build/site/index.html"
