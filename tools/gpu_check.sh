#!/bin/bash
# Checks a bundle (tools/bundle.sh) on a machine with a GPU:
#
#   tools/gpu_check.sh correct     tests on the GPU, PyTorch's recorded runs, the invariant
#   tools/gpu_check.sh speed       training steps and attention
#   tools/gpu_check.sh offload     states and weights on the host, up to 8B parameters (128 GB memory)
#   tools/gpu_check.sh sanitize    the kernels under compute-sanitizer
#
# Each part takes less than ten minutes, and each check has its own time limit. Prints one line per
# check: name, "ok", "FAILED" or "skipped", seconds, and the figure or the reason. A failure does
# not stop the others. The status is 1 if a check failed, 77 if all were skipped, otherwise 0.
# Skipped checks are counted separately. Logs are in $OUT/PART, or gpu_check/PART. Needs bash,
# coreutils and python3.
set -u

usage() {
  echo "gpu_check: error: name one of correct, speed, offload, sanitize" >&2
  exit 2
}

[ $# -eq 1 ] || usage
case $1 in correct | speed | offload | sanitize) ;; *) usage ;; esac
part=$1
top=$(cd "$(dirname "$0")/.." && pwd)
bin=$top/bin
logs=${OUT:-$PWD/gpu_check}/$part
mkdir -p "$logs" || exit 1
export BALLAST_TEST_DATA=$top/tests/data XDG_CACHE_HOME=$logs/cache
export PATH=$PATH:/usr/local/cuda/bin
# Seconds for all checks together.
all=${GPU_CHECK_SECONDS:-570}
no_gpu="" ok=0 failed=0 skipped=0

report() { # NAME VERDICT SECONDS TEXT
  case $2 in ok) ok=$((ok + 1)) ;; skipped) skipped=$((skipped + 1)) ;; *) failed=$((failed + 1)) ;; esac
  printf '%-30s %-7s %4s s  %s\n' "$1" "$2" "$3" "${4:0:150}"
}

# Prints why the tests of a log were skipped: the line below Google Test's "Skipped", or else the
# first line.
skip_reason() {
  python3 - "$1" <<'P'
import sys
lines = [line.strip() for line in open(sys.argv[1], errors="replace") if line.strip()]
below = [after for line, after in zip(lines, lines[1:]) if line.endswith(": Skipped")]
print((below or lines or ["no reason given"])[0])
P
}

failure_reason() {
  python3 - "$1" <<'P'
import re, sys
lines = [line.strip() for line in open(sys.argv[1], errors="replace") if line.strip()]
words = re.compile(r"error|Failure|FAILED|ERROR SUMMARY: [1-9]|cannot|Assertion|terminate|\bfault\b")
print(([line for line in lines if words.search(line)] or lines[-1:] or ["no output"])[0])
P
}

# Prints the figure of a benchmark's --json, or nothing.
figure() {
  python3 - "$1" <<'P'
import json, sys
text = open(sys.argv[1], errors="replace").read()
try:
    row = json.loads(text[text.index("["):])[0]
    print(f"{row['tokens_per_second']:,.0f} tok/s, {row['step_seconds']:.3f} s per step, "
          f"{row['model_percent_of_gemm_peak']:.1f}% of the GEMM peak, loss {row['loss']:.4f}")
except (ValueError, KeyError, IndexError, TypeError):
    pass
P
}

check() { # NAME SECONDS COMMAND...
  local name=$1 most=$2 start=$SECONDS log left status text
  shift 2
  log=$logs/${name//[^A-Za-z0-9.]/_}.log
  left=$((all - SECONDS))
  if [ "$left" -lt 5 ]; then
    report "$name" skipped 0 "no time is left of $all s"
    return
  fi
  [ "$most" -le "$left" ] || most=$left
  echo "$*" >"$log.command"
  timeout -k 5 "$most" "$@" >"$log" 2>&1
  status=$?
  if [ $status -eq 77 ] ||
    { [ $status -eq 0 ] && grep -qaF '[  SKIPPED ]' "$log" && ! grep -qaF '[       OK ]' "$log"; }; then
    report "$name" skipped $((SECONDS - start)) "$(skip_reason "$log")"
  elif [ $status -eq 0 ]; then
    text=$(figure "$log")
    if grep -qaE '^\[  SKIPPED \] [0-9]+ test' "$log"; then
      text="$(grep -aoE '^\[  PASSED  \] [0-9]+' "$log" | grep -oE '[0-9]+') tests passed,"
      text+=" $(grep -aoE '^\[  SKIPPED \] [0-9]+' "$log" | grep -oE '[0-9]+') skipped: $(skip_reason "$log")"
    fi
    report "$name" ok $((SECONDS - start)) "$text"
  elif [ $status -eq 124 ] || [ $status -eq 137 ]; then
    report "$name" FAILED $((SECONDS - start)) "not done after $most s (status $status)"
  else
    report "$name" FAILED $((SECONDS - start)) "status $status: $(failure_reason "$log")"
  fi
}

# The first check. Without a GPU, checks that do not skip themselves are left out.
check_gpu() {
  local before=$skipped
  check GPU 60 "$bin/gpu_device"
  if [ $skipped -gt $before ]; then no_gpu=$(skip_reason "$logs/GPU.log"); fi
}

# Runs a check that needs a GPU and, if TOOL is not -, a program of the machine.
on_gpu() { # TOOL NAME SECONDS COMMAND...
  local tool=$1
  shift
  if [ -n "$no_gpu" ]; then
    report "$1" skipped 0 "$no_gpu"
  elif [ "$tool" != - ] && ! command -v "$tool" >/dev/null; then
    report "$1" skipped 0 "there is no $tool"
  else
    check "$@"
  fi
}

step() { # NAME SECONDS OPTIONS...
  local name=$1 most=$2
  shift 2
  on_gpu - "$name" "$most" "$bin/ballast" bench step --device cuda --json "$@"
}

sanitize() { # TOOL NAME SECONDS FILTER
  on_gpu compute-sanitizer "$1, $2" "$3" compute-sanitizer --tool "$1" --error-exitcode 9 \
    "$bin/gpu_kernels" --gtest_filter="$4"
}

kernels() { # NAME SECONDS FILTER
  check "$1" "$2" "$bin/gpu_kernels" --gtest_filter="$3"
}

correct() {
  kernels kernels 150 '-FusedAttentions.*'
  kernels 'attention of cuDNN' 60 'FusedAttentions.*'
  if [ -x "$bin/gpu_sum" ]; then check 'sums over ranks' 30 "$bin/gpu_sum"; fi
  export BALLAST_TEST_DEVICE=cuda
  check "PyTorch's runs" 120 "$bin/gpu_pytorch_parity_on_cuda"
  check families 120 "$bin/gpu_families_on_cuda"
  check invariance 150 "$bin/gpu_invariance_on_cuda"
  cat >"$logs/doctor.json" <<J
{"model": {"family": "llama", "vocab_size": 32000, "hidden_size": 2048, "num_layers": 24,
           "num_heads": 16, "num_kv_heads": 4, "intermediate_size": 7680},
 "data": {"tokens": ["none"], "token_type": "u16", "sequence_length": 2048},
 "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}, "bf16": {"enabled": true},
 "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1,
 "ballast": {"device": "cuda", "out": "run"}}
J
  on_gpu - doctor 90 "$bin/ballast" doctor "$logs/doctor.json"
  on_gpu - link 30 "$bin/ballast" bench link --device cuda --bytes 16MiB,256MiB --seconds 1
  step 'a step of GPT-2 124M' 60 --sequence 512 --micro-batch 4 --steps 5
}

llama_1_5b=(--family llama --vocab 32000 --hidden 2048 --layers 24 --heads 16 --kv-heads 4
  --intermediate 7680 --sequence 2048)
llama_8b=(--family llama --vocab 128256 --hidden 4096 --layers 32 --heads 32 --kv-heads 8
  --intermediate 14336 --sequence 2048)

speed() {
  local shape
  for shape in '2 1' '2 4' '2 16' '8 4'; do
    set -- $shape
    step "1.5B, micro-batch $1 x $2" 60 "${llama_1_5b[@]}" --micro-batch "$1" --accumulation "$2" --steps 4
  done
  step '1.5B, attention by Ballast' 50 "${llama_1_5b[@]}" --micro-batch 8 --accumulation 4 --steps 3 \
    --set ballast.attention=own
  step '1.5B, timed products' 60 "${llama_1_5b[@]}" --micro-batch 8 --accumulation 4 --steps 3 \
    --set ballast.product_algorithms=timed
  step '1.5B, recomputed' 50 "${llama_1_5b[@]}" --micro-batch 8 --accumulation 4 --steps 3 \
    --set ballast.recompute=true
  step 'GPT-2 124M' 40 --sequence 512 --micro-batch 4 --steps 10
  for shape in '1024 8 16 64' '4096 2 32 128' '16384 1 32 128'; do
    set -- $shape
    on_gpu - "attention, $1 x $2, heads of $4" 25 "$bin/ballast" bench attention --sequence "$1" \
      --micro-batch "$2" --heads "$3" --kv-heads 8 --head-size "$4" --seconds 0.5
  done
  if [ -z "$no_gpu" ] && ! python3 -c 'import torch' 2>/dev/null; then
    report 'PyTorch, 1.5B' skipped 0 'python3 has no module torch'
  else
    on_gpu - 'PyTorch, 1.5B' 150 python3 -B "$top/tools/bench/step_peers.py" --device cuda \
      --preset 1.5b --recompute no --compile both --rounds 2 --ballast "$bin/ballast"
  fi
}

offload() {
  local states=(--set zero_optimization.stage=3 --set zero_optimization.offload_optimizer.device=cpu)
  local all_on_host=("${states[@]}" --set zero_optimization.offload_param.device=cpu)
  local run=("${llama_1_5b[@]}" --micro-batch 8 --accumulation 4 --steps 3 --set ballast.recompute=true)
  step '1.5B, all on the GPU' 50 "${run[@]}"
  step '1.5B, states on the host' 60 "${run[@]}" "${states[@]}"
  step '1.5B, all on the host' 60 "${run[@]}" "${all_on_host[@]}"
  step '1.5B, eager update' 60 "${run[@]}" "${all_on_host[@]}" --set ballast.update=eager --set gradient_clipping=0
  on_gpu - 'update on the CPU' 40 "$bin/ballast" bench adam --params 256Mi --variant adamw-bf16 --seconds 2
  step '8B in 24 GiB, all on the host' 300 "${llama_8b[@]}" --micro-batch 4 --accumulation 8 --steps 2 \
    "${all_on_host[@]}" --set ballast.device_bytes=24GiB --set ballast.host_bytes=112GiB
}

check_memory_and_races() {
  local rest='CudaNorm*:CudaRows*:CudaGradients*:CudaCodes*:Tokens*:SumLosses*:CudaUpdate*'
  sanitize memcheck attention 120 'Attention*'
  sanitize memcheck 'other kernels' 90 "$rest"
  sanitize racecheck attention 120 'Attention*'
  sanitize racecheck 'other kernels' 90 "$rest"
  sanitize synccheck 'all kernels' 60 "Attention*:$rest"
  sanitize initcheck 'all kernels' 60 "Attention*:$rest"
}

if ! version=$("$bin/ballast" --version 2>&1); then
  report 'the program starts' FAILED 0 "$version"
else
  echo "$version"
fi
if command -v nvidia-smi >/dev/null; then
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
fi
check_gpu
case $part in
  sanitize) check_memory_and_races ;;
  *) $part ;;
esac
echo "$part: $ok ok, $failed failed, $skipped skipped in $SECONDS s; logs in $logs"
if [ $failed -gt 0 ]; then exit 1; fi
if [ $ok -eq 0 ]; then exit 77; fi
exit 0
