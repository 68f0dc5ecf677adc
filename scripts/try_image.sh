#!/usr/bin/env bash
# Makes an environment with the releases that a free TPU notebook has, runs tpukit in it, and prints
# what passed, failed and was skipped, and the TPU compiler's answers:
#
#   scripts/try_image.sh kaggle-tpu                  # all parts
#   scripts/try_image.sh colab-tpu doctor target     # some of them
#
# Parts: doctor   no remark about a version
#        target   probe-batch --target v5e-8 for GPT-2 and EIT, by the image's own libtpu
#        xla      the default suite's tests of torch_xla and of the TPU compiler
#        suite    the default suite, with these
#        zoo      the dozen models of tests/zoo that the default suite trains
#        notebooks  a whole notebook on eight virtual devices
#
# The environment takes 8 GB and is kept in build/, or in the folder that TPUKIT_TRY_DIR names, with
# the parts' logs. PYTHON names the interpreter, else python3.12 or python3.13 is looked
# for; TPUKIT_TRY_PROCESSES the number of processes that test (2). PYTEST_ARGUMENTS (`-k zoo`) narrows
# the parts that test, PROBE_ARGUMENTS (`--start 8 --max 8`) what is compiled.
set -euo pipefail
cd "$(dirname "$0")/.."
image=${1:-}
shift || true
parts=${*:-doctor target suite zoo notebooks}
case $image in
  kaggle-tpu)
    python=${PYTHON:-python3.12}
    packages=(torch==2.8.0 torch_xla==2.8.0 torchvision==0.23.0 libtpu==0.0.17 'tensorflow-cpu==2.20.*') ;;
  colab-tpu)
    python=${PYTHON:-python3.13}
    packages=(torch==2.9.0 torch_xla==2.9.0 torchvision==0.24.0 libtpu==0.0.21.1 jax==0.7.2 jaxlib==0.7.2
      accelerate==1.14.0 transformers==5.15.0) ;;
  *) echo "usage: scripts/try_image.sh kaggle-tpu|colab-tpu [PART ...]" >&2; exit 2 ;;
esac

venv=${TPUKIT_TRY_DIR:-$PWD/build}/$image
results=$venv/results
mkdir -p "$results"
versions() { # none where no package of the image is there
  "$venv/bin/python" -m pip --disable-pip-version-check freeze |
    grep -iE '^(torch|torch[-_]xla|torchvision|libtpu|jax|jaxlib|tensorflow[-_]cpu|accelerate|transformers)=='
}
if [ ! -e "$venv/.installed" ]; then
  "$python" -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "${packages[@]}"
  versions >"$venv/image"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -e '.[test]'
  # Shows what of the image another release took the place of: Colab's transformers is older than 5.23.
  versions | grep -Fxf "$venv/image" | diff "$venv/image" - || echo "(replaced by the installation)"
  touch "$venv/.installed"
fi
# Tests start `python -m tpukit` by this interpreter and find tpukit's commands beside it.
export PATH="$venv/bin:$PATH" TPUKIT_CACHE_DIR="$venv/cache"
unset PYTHONPATH VIRTUAL_ENV
python() { "$venv/bin/python" "$@"; }
failed=0
run_tests() { # PART ARGUMENT ...
  local part=$1
  shift
  python -m pytest -q -n "${TPUKIT_TRY_PROCESSES:-2}" "$@" ${PYTEST_ARGUMENTS:-} >"$results/$part.log" 2>&1 ||
    failed=1
  grep ^FAILED "$results/$part.log" || true
  echo "$part: $(tail -n 1 "$results/$part.log")"
}
probe() { # NAME ARGUMENT ...
  local name=$1
  shift
  python -m tpukit probe-batch "$@" --target v5e-8 ${PROBE_ARGUMENTS:-} >"$results/target-$name.log" 2>&1 ||
    failed=1
  echo "target $name: $(tail -n 3 "$results/target-$name.log")"
}
versions
for part in $parts; do
  echo "$image: $part" >&2
  case $part in
    doctor) # ends with 1 for other remarks, too
      python -m tpukit doctor --quick --json >"$results/doctor.json" || true
      python -c 'import json, sys
about = ("torch-and-torch-xla", "libtpu", "jax", "torchvision", "tensorflow", "old-releases")
checks = json.load(open(sys.argv[1]))["checks"]
found = [c for c in checks if c["id"] in about and c["status"] in ("warn", "fail")]
print("doctor:", found or "no remark about a version")
sys.exit(bool(found))' "$results/doctor.json" || failed=1 ;;
    target)
      probe gpt2 --task llm
      probe eit --task eit --size published ;;
    xla) run_tests xla -m '(xla or plan) and not slow' ;;
    suite) run_tests suite ;;
    zoo) run_tests zoo tests/zoo ;;
    notebooks) run_tests notebooks tests/test_notebooks.py -m '' \
      -k 'eight_virtual_devices or valid or made_from' ;;
    *) echo "no part is called $part" >&2; exit 2 ;;
  esac
done
exit $failed
