#!/usr/bin/env bash
# Makes an environment with torch_tpu and a plugin that lets the CPU stand in for a TPU, and runs the
# tests of torch_tpu there:
#
#   scripts/try_torch_tpu.sh
#   scripts/try_torch_tpu.sh -k eit
#
# The environment takes 8 GB with torch's CUDA build, 3 GB with a CPU build (TPUKIT_TORCH=2.13.0+cpu,
# where pip knows an index that has it for torchvision too). TPUKIT_TRY_DIR names the folder it is made
# in, where it is kept and used again; TPUKIT_TORCH another torch (2.11 to 2.15).
set -euo pipefail
cd "$(dirname "$0")/.."
torch=${TPUKIT_TORCH:-2.13.0}
venv=${TPUKIT_TRY_DIR:-/tmp}/torch-tpu-$torch

if [ ! -e "$venv/.installed" ]; then
  "${PYTHON:-python3}" -m venv "$venv"
  pip() { "$venv/bin/python" -m pip --quiet --disable-pip-version-check "$@"; }
  # "===": a build of its own (+cpu) that lies on this machine would not fit the index' torchvision.
  pip install "torch===$torch" -e '.[torch-tpu,test]' 'libtpu==0.0.52' 'jax==0.10.2'
  # The PJRT plugin for CPUs, byte for byte the one that the tests' hook was written for.
  pip install --no-deps --require-hashes --requirement tests/support/torch_tpu_on_cpu/requirements.txt
  touch "$venv/.installed"
fi
"$venv/bin/python" -m pip --disable-pip-version-check list | grep -iE '^(torch|torch.tpu|libtpu|lammps\S*) '
unset PYTHONPATH
exec "$venv/bin/python" -m pytest -q -n "${TPUKIT_TRY_PROCESSES:-1}" -m torch_tpu "$@"
