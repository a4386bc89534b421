#!/usr/bin/env bash
# Give the pretrain scripts of a Megatron-LM checkout --attention-backend magi, or take it away.
#
#     scripts/apply_patches.sh CHECKOUT            # apply
#     scripts/apply_patches.sh CHECKOUT --check    # say whether it would apply; change nothing
#     scripts/apply_patches.sh CHECKOUT --revert   # the scripts as they were, byte for byte
set -euo pipefail

patches=$(cd "$(dirname "$0")/../patches" && pwd)
usage="usage: scripts/apply_patches.sh CHECKOUT [--check|--revert]"

fail() {
    echo "apply_patches.sh: $1" >&2
    exit 1
}

# The folder under patches/ of the checkout's minor version.
folder_of() {
    local info=$1/megatron/core/package_info.py minor tag
    [[ -f $info && -f $1/pretrain_gpt.py ]] ||
        fail "a Megatron-LM checkout with pretrain_gpt.py is required, got $1; name its root"
    minor=$(sed -n 's/^MAJOR = //p;s/^MINOR = //p' "$info" | paste -sd.)
    case $minor in
        0.18) tag=core_v0.18.2 ;;
        0.19) tag=core_v0.19.0 ;;
        0.20) tag=main-d98e8a64 ;;
        *) fail "Megatron-LM 0.18 to 0.20 is required, got ${minor:-no version}; check out one of \
these" ;;
    esac
    echo "$patches/megatron-lm-$tag"
}

# Without context lines a patch fits anywhere, so its place is looked at here.
check_places() {
    local file line text
    while read -r file line; do
        [[ -f $checkout/$file ]] || fail "$file is required, got none; restore it"
        ! grep -q megatron_magi "$checkout/$file" ||
            fail "scripts without our lines are required, got $file with some; restore it first"
        text=$(sed -n "${line}p" "$checkout/$file")
        [[ $text == "import torch" ]] ||
            fail "line $line of $file must be 'import torch', got '$text': the file is not that of \
${folder##*/megatron-lm-}; put the two lines of $patch behind 'import torch' yourself"
    done < <(sed -n 's,^+++ b/,,p;s/^@@ -\([0-9]*\),0 .*/\1/p' "$patch" | paste -d' ' - -)
}

# Git must not take a repository around the checkout for the checkout's own.
git_apply() {
    (cd "$checkout" && GIT_CEILING_DIRECTORIES=$(dirname "$checkout") \
        git apply --unidiff-zero "$@" "$patch" 2>/dev/null)
}

[[ $# -eq 1 || ($# -eq 2 && ($2 == --check || $2 == --revert)) ]] || fail "$usage"
[[ -d $1 ]] || fail "a Megatron-LM checkout is required, got $1, which is no folder; name its root"
checkout=$(cd "$1" && pwd -P)
folder=$(folder_of "$checkout")
patch=$folder/0001-magi-attention-backend.patch

applied=no
git_apply --check --reverse && applied=yes
if [[ ${2:-} == --revert ]]; then
    [[ $applied == yes ]] || fail "a patched checkout is required, got one that is not or only in \
part; nothing was changed"
    git_apply --reverse
    echo "reverted ${folder##*/}"
    exit
fi
[[ $applied == no ]] || fail "scripts without the patch are required, got patched ones; take it \
away by --revert"
check_places
git_apply --check || fail "the patch must apply, got an error of git; see git apply --unidiff-zero \
--check $patch"
if [[ ${2:-} == --check ]]; then
    echo "${folder##*/} applies"
    exit
fi
git_apply
echo "applied ${folder##*/}"
