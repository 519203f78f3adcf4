#!/usr/bin/env bash
# Makes a virtual environment with everything that training and testing need: requirements/setup.sh VENV
#
# PYTHON           the interpreter that makes it (python3); 3.11 or later
# TORCH_INDEX_URL  where pip looks for torch's CPU build if it does not find it otherwise (PyTorch's public index)
set -euo pipefail

venv=${1:?usage: requirements/setup.sh VENV}
python=${PYTHON:-python3}
torch_index_url=${TORCH_INDEX_URL:-https://download.pytorch.org/whl/cpu}
here=$(cd "$(dirname "$0")" && pwd)

say() { echo "set-up: $*"; }
fail() { echo "set-up: $*" >&2; exit 1; }

command -v "$python" >/dev/null || fail "there is no $python; install Python 3.11 or later (Debian: apt-get install python3 python3-venv)"

version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "$python is Python $version; Frostline needs 3.11 or later; name another one: make PYTHON=python3.12"

if [ ! -x "$venv/bin/python" ]; then
    for module in venv ensurepip; do
        "$python" -c "import $module" 2>/dev/null ||
            fail "$python ($version) has no module $module; on Debian it is in the package python3-venv: apt-get install python3-venv"
    done
    say "making $venv with Python $version"
    "$python" -m venv "$venv"
fi

pip=("$venv/bin/python" -m pip --disable-pip-version-check --no-input)
torch=$(grep '^torch==' "$here/cpu.txt")
index=()
if ! "${pip[@]}" install --quiet --dry-run --no-deps "$torch" >/dev/null 2>&1; then
    say "pip does not find $torch where it looks, so PyTorch's CPU index is added: $torch_index_url"
    index=(--extra-index-url "$torch_index_url")
fi

count=$(cat "$here/cpu.txt" "$here/dev.txt" | grep -c '==')
say "installing $count pinned packages from requirements/cpu.txt and requirements/dev.txt (one to three minutes)"
"${pip[@]}" install --quiet --quiet --no-compile --no-deps "${index[@]}" -r "$here/cpu.txt" -r "$here/dev.txt"

say "installing Frostline itself, editable"
"${pip[@]}" install --quiet --quiet --no-deps --no-build-isolation --editable "$here/.."
say "done; a second run skips all this until requirements/ or pyproject.toml change"
