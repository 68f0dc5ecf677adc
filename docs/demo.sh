#!/usr/bin/env bash
# The whole of tpukit on simulated data, in about ten minutes on two cores: `make demo`.
set -euo pipefail
out=${TPUKIT_DEMO:-demo}

echo "== Electrical impedance tomography: simulate, train, test"
tpukit data eit --out "$out/eit" --n 6000 --seed 1
tpukit train --preset quick --data-path "$out/eit" --results-dir "$out/deit" --max-time 2m
tpukit test --run "$out/deit" --data simulated --data-path "$out/eit" --samples 4 --limit 64 --out "$out/deit/test"
if [ -n "${TPUKIT_UEF2017:-}" ]; then
  tpukit test --run "$out/deit" --data uef2017 --data-path "$TPUKIT_UEF2017" --samples 8 --out "$out/deit/uef2017"
fi

echo "== Images: generate, train, test, predict"
tpukit data images --out "$out/shapes" --seed 1
tpukit train --task images --preset quick --data-path "$out/shapes" --results-dir "$out/images" --max-time 90s
tpukit test --run "$out/images"
tpukit predict --run "$out/images" --out "$out/shapes.csv"

echo "== Dialogue summaries: make, train, predict"
tpukit data dialogues --out "$out/dialogues" --n 12000 --seed 1
tpukit summarize-train --preset quick --data-path "$out/dialogues" --results-dir "$out/summaries" --max-time 90s
tpukit predict --run "$out/summaries" --test-csv "$out/dialogues/test.csv" --out "$out/submission.csv"

echo "== Pictures: $out/deit/test, $out/images/test-valid; reports: $out/deit/report.html, $out/images/report.html, $out/summaries/report.html; $out/submission.csv"
