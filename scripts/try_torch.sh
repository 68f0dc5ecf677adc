#!/usr/bin/env bash
# Installs the wheel beside a given torch in a new virtual environment, fails if that changes torch,
# torchvision or timm, and runs the tests there that need no torch_xla:
#
#   scripts/try_torch.sh 2.8.0
#   scripts/try_torch.sh 2.8.0 python3.12 tests/train    # another interpreter, some tests
#
# The environment takes 5 to 8 GB; TPUKIT_TRY_DIR names the folder it is made in, and it is deleted.
set -euo pipefail
cd "$(dirname "$0")/.."
torch=$1 python=${2:-python3}
shift $(($# < 2 ? $# : 2))
work=$(mktemp -d "${TPUKIT_TRY_DIR:-/tmp}/try-torch-XXXXXX")
trap 'rm -rf "$work"' EXIT

"$python" -m venv "$work/venv"
pip() { "$work/venv/bin/python" -m pip --disable-pip-version-check "$@"; }
versions() { pip freeze | grep -iE '^(torch|torchvision|timm|triton|nvidia-[a-z0-9-]+)=='; }

# "===": a build of its own (+cpu) that lies on this machine would not fit the index' torchvision.
pip install --quiet "torch===$torch" "torchvision>=0.23" timm
versions >"$work/before"
pip wheel --quiet --no-deps --wheel-dir "$work" .
wheel=$(echo "$work"/tpukit-*.whl)
pip install --quiet "$wheel[test]"
versions >"$work/after"
diff "$work/before" "$work/after"
pip check || true
grep -E '^(torch|torchvision|timm)=' "$work/after"
"$work/venv/bin/python" --version

# A copy without the package: what is tested is what the wheel installed.
mkdir "$work/checkout"
git ls-files | grep -v '^tpukit/' | tar -c -T - | tar -x -C "$work/checkout"
cd "$work/checkout"
unset PYTHONPATH
"$work/venv/bin/python" -m pytest -q "$@"
