#!/usr/bin/env bash
# Runs on a GPU what docs/first_gpu.md lists, in a new folder, and prints what agrees with a CPU:
#
#   scripts/try_gpu.sh            # ten minutes or more; logs stay in the folder that it names
#   scripts/try_gpu.sh cpu        # the same commands where there is no GPU, to try the script
set -uo pipefail
cd "$(dirname "$0")/.."
repository=$PWD hw=${1:-gpu}
work=$(mktemp -d "${TPUKIT_TRY_DIR:-/tmp}/try-gpu-XXXXXX")
cd "$work"
echo "logs: $work"

run() { # NAME COMMAND...: its output goes to NAME.log
  local name=$1 started=$SECONDS
  shift
  "$@" >"$name.log" 2>&1
  echo "$name: exit code $?, $((SECONDS - started)) s"
}
kit() { python -m tpukit "$@"; }
losses() { grep -o '"loss": [0-9.e-]*\|"valid_loss": [0-9.e-]*' "$1/metrics.jsonl"; }
same() { # WORDS FILE FILE
  if cmp -s "$2" "$3"; then echo "$1: the same"; else echo "$1: not the same ($2, $3)"; fi
}

run doctor kit doctor --hw "$hw" --verbose
run selftest kit doctor --selftest --hw "$hw"
run tests bash -c "cd '$repository' && python -m pytest -q -n 0 -m gpu tests/hardware/eager tests/train/test_every_optimizer.py tests/test_draws.py"

run data-images kit data images --out shapes --n 1500
run data-dialogues kit data dialogues --out dialogues --n 400
run data-eit kit data eit --out eit --n 400
images=(train --task images --data-path shapes --set model=resnet18 --global-batch-size 64)
summaries=(summarize-train --data-path dialogues --init scratch --tokenizer train --model 4x4x192
  --block-size 256 --global-batch-size 16)
fp32=(--precision fp32 --no-compile --max-steps 8 --log-every 1 --ckpt-every 8)
for device in "$hw" cpu; do
  run "images-$device" kit "${images[@]}" "${fp32[@]}" --hw "$device" --results-dir "images-$device"
  run "summaries-$device" kit "${summaries[@]}" "${fp32[@]}" --hw "$device" \
    --results-dir "summaries-$device"
done
for task in images summaries; do
  paste <(losses "$task-$hw") <(losses "$task-cpu") >"$task-losses.txt"
  echo "losses of $task, here and on the CPU: $work/$task-losses.txt"
done
for device in "$hw" cpu; do
  run "predict-$device" kit predict --run summaries-cpu --hw "$device" --max-new-tokens 24 \
    --out "texts-$device.csv"
done
same "texts here and on the CPU" "texts-$hw.csv" texts-cpu.csv

eit=(train --size small --data-path eit --global-batch-size 16 --hw "$hw" --no-compile
  --max-steps 60 --ckpt-every 30 --deterministic)
for twin in one other; do run "eit-$twin" kit "${eit[@]}" --results-dir "eit-$twin"; done
same "weights of two runs" eit-{one,other}/checkpoints/step-00000060/model.safetensors
rm -r eit-other/checkpoints/step-00000060
run eit-resumed kit "${eit[@]}" --results-dir eit-other
same "weights of a resumed run" eit-{one,other}/checkpoints/step-00000060/model.safetensors
# Ends with exit code 1: the gradient of one sample is not finite.
run steep kit train --task "$repository/tests/support/steep_task.py:Steep" --set bad=37 --hw "$hw" \
  --max-steps 10 --ckpt-every 3 --results-dir steep

run compiled kit train --data-path eit --global-batch-size 16 --hw "$hw" --compile --max-steps 30 \
  --results-dir compiled
run fp16 kit "${images[@]}" --hw "$hw" --precision fp16 --max-steps 120 --results-dir fp16
run search kit probe-batch --task images --set model=resnet18 --set compile=false --hw "$hw" \
  --memory-limit 4GB --data-path shapes
run memory python "$repository/benchmarks/gpu_measured.py" --hw "$hw" --out "$work/memory.json"
