#!/usr/bin/env bash
# Runs on a GPU what docs/first_gpu.md lists, in a new folder, and prints what agrees with a CPU:
#
#   scripts/try_gpu.sh            # ten minutes or more; logs stay in the folder that it names
#   scripts/try_gpu.sh cpu        # the same commands where there is no GPU, to try the script
#   scripts/try_gpu.sh gpu 4bits  # weights in 4 bits alone, two minutes (needs bitsandbytes)
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

four_bits() { # a small Qwen3 beside the CPU's, exported; a step of Qwen3-0.6B's shape
  run data-few kit data dialogues --out few --n 200
  # A file there is named as a package that transformers looks for: the folder is in no path.
  run qwen python -c "
from pathlib import Path
from runpy import run_path
write_tokenizer = run_path('$repository/tests/support/tiny_qwen.py')['write_tokenizer']
from transformers import Qwen3Config, Qwen3ForCausalLM
Path('qwen').mkdir()
Qwen3ForCausalLM(Qwen3Config(
    vocab_size=write_tokenizer(Path('qwen')), hidden_size=256, intermediate_size=768, head_dim=64,
    num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024,
    initializer_range=0.05)).bfloat16().save_pretrained('qwen')"
  local device qlora=(summarize-train --data-path few --init qwen --block-size 512
    --global-batch-size 8 --set weights=nf4 --set lora_rank=16
    --set lora_targets=qkv,attention_out,mlp_in,mlp_out --set score_samples=0 --log-every 1)
  for device in "$hw" cpu; do
    run "nf4-$device" kit "${qlora[@]}" --hw "$device" --precision fp32 --no-compile --max-steps 8 \
      --results-dir "nf4-$device"
  done
  paste <(losses "nf4-$hw") <(losses nf4-cpu) >nf4-losses.txt
  echo "losses in 4 bits, here and on the CPU: $work/nf4-losses.txt"
  run nf4-half kit "${qlora[@]}" --hw "$hw" --max-steps 20 --set optimizer=paged_adamw_8bit \
    --results-dir nf4-half
  run nf4-export kit test --run "nf4-$hw" --export nf4-exported --hw "$hw"
  run nf4-loads python -c "
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
import sys
device = sys.argv[1]
tokens = torch.arange(64, device=device)[None]
packed = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4',
                            bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.float32)
with torch.no_grad():
    merged = AutoModelForCausalLM.from_pretrained('nf4-exported', dtype=torch.float32).to(device)
    base = AutoModelForCausalLM.from_pretrained('qwen', dtype=torch.float32, device_map=device,
                                                quantization_config=packed)
    beside = PeftModel.from_pretrained(base, 'nf4-exported/adapter').eval()
    one, other = merged(tokens).logits, beside(tokens).logits
print('merged beside the adapter in peft:', (one - other).abs().max().item(), 'of',
      other.abs().max().item())" "$([ "$hw" = gpu ] && echo cuda || echo cpu)"
  tail -n 1 nf4-loads.log
  run memory-nf4 python "$repository/benchmarks/gpu_measured.py" --only nf4 --hw "$hw" \
    --out "$work/memory-nf4.json"
  cat memory-nf4.log
}
if [ "${2:-}" = 4bits ]; then
  four_bits
  exit
fi

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
four_bits
