#!/bin/bash
# Checks a bundle (tools/bundle.sh) on a machine with a GPU:
#
#   tools/gpu_check.sh first [1|2]  what matters most, in 12 minutes; 1: the first 7, 2: the other 5
#   tools/gpu_check.sh correct      tests on the GPU, PyTorch's recorded runs, the invariant
#   tools/gpu_check.sh speed        training steps and attention
#   tools/gpu_check.sh offload      states and weights on the host, up to 8B parameters (128 GB memory)
#   tools/gpu_check.sh sanitize     the kernels under compute-sanitizer
#
# Each other part takes less than ten minutes, and each check has its own time limit. Prints one
# line per check: name, "ok", "FAILED" or "skipped", seconds, and the figure or the reason. A
# failure does not stop the others. The status is 1 if a check failed, 77 if all were skipped,
# otherwise 0. Skipped checks are counted separately.
#
# In $OUT (default: gpu_check) are results.jsonl, which has a line of JSON per check with all
# figures, and the logs of each part, packed at the end: PART-logs.tar.gz. Measurements of the
# machine are kept for later parts in $XDG_CACHE_HOME, or a folder in /tmp. Needs bash, coreutils,
# tar and python3.
set -u

usage() {
  echo "gpu_check: error: name one of first, first 1, first 2, correct, speed, offload, sanitize" >&2
  exit 2
}

half=""
case "$#:$*" in
  1:first | 1:correct | 1:speed | 1:offload | 1:sanitize) part=$1 ;;
  '2:first 1' | '2:first 2') part=$1 half=$2 ;;
  *) usage ;;
esac
case $part$half in
  first) : "${GPU_CHECK_SECONDS:=720}" ;;
  first1) : "${GPU_CHECK_SECONDS:=420}" ;;
  first2) : "${GPU_CHECK_SECONDS:=300}" ;;
esac
top=$(cd "$(dirname "$0")/.." && pwd)
bin=$top/bin
out=${OUT:-$PWD/gpu_check}
logs=$out/$part$half
mkdir -p "$logs" || exit 1
export XDG_CACHE_HOME=${XDG_CACHE_HOME:-${TMPDIR:-/tmp}/ballast-gpu-check-$(id -u)}
export BALLAST_TEST_DATA=$top/tests/data CUDA_CACHE_PATH=$XDG_CACHE_HOME/cuda
export CUDA_CACHE_MAXSIZE=1073741824 PATH=$PATH:/usr/local/cuda/bin
. "$top/tools/gpu_check/running.sh"
. "$top/tools/gpu_check/shapes.sh"
. "$top/tools/gpu_check/first.sh"

correct() {
  kernels kernels 150 '-FusedAttentions.*'
  conclude
  check 'attention of cuDNN' 60 "$bin/gpu_kernels" --gtest_filter='FusedAttentions.*'
  if [ -x "$bin/gpu_sum" ]; then check 'sums over ranks' 30 "$bin/gpu_sum"; fi
  export BALLAST_TEST_DEVICE=cuda
  launch "PyTorch's runs" 120 4 "$bin/gpu_pytorch_parity_on_cuda"
  launch families 120 8 "$bin/gpu_families_on_cuda"
  conclude
  launch invariance 150 6 "$bin/gpu_invariance_on_cuda"
  conclude
  cat >"$logs/doctor.json" <<J
{"model": {"family": "llama", "vocab_size": 32000, "hidden_size": 2048, "num_layers": 24,
           "num_heads": 16, "num_kv_heads": 4, "intermediate_size": 7680},
 "data": {"tokens": ["none"], "token_type": "u16", "sequence_length": 2048},
 "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}, "bf16": {"enabled": true},
 "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1,
 "ballast": {"device": "cuda", "out": "run"}}
J
  on_gpu - doctor 90 "$bin/ballast" doctor "$logs/doctor.json"
  on_gpu - link 30 "$bin/ballast" bench link --json --device cuda --bytes 16MiB,256MiB --seconds 1
  step 'a step of GPT-2 124M' 60 --sequence 512 --micro-batch 4 --accumulation 2 --steps 5
}

speed() {
  local shape
  for shape in '2 1' '2 4' '2 16' '8 4' '16 2'; do
    set -- $shape
    step "1.5B, micro-batch $1 x $2" 60 "${llama_1_5b[@]}" --micro-batch "$1" --accumulation "$2" --steps 4
  done
  step '1.5B, first choices of products' 60 "${llama_1_5b[@]}" --micro-batch 8 --accumulation 4 --steps 3 \
    --set ballast.product_algorithms=heuristic
  for shape in '1024 8 16 64' '4096 2 32 128' '16384 1 32 128'; do
    set -- $shape
    on_gpu - "attention, $1 x $2, heads of $4" 25 "$bin/ballast" bench attention --json --sequence "$1" \
      --micro-batch "$2" --heads "$3" --kv-heads 8 --head-size "$4" --seconds 0.5
  done
  with_modules torch 'PyTorch, 1.5B' 150 python3 -B "$top/tools/bench/peers/step_peers.py" --device cuda \
    --preset 1.5b --recompute no --compile both --rounds 2 --json --ballast "$bin/ballast"
}

offload() {
  local run=("${llama_1_5b[@]}" --micro-batch 8 --accumulation 4 --steps 3 --set ballast.recompute=true)
  step '1.5B, all on the host' 60 "${run[@]}" "${all_on_host[@]}"
  step '1.5B, eager update' 60 "${run[@]}" "${all_on_host[@]}" --set ballast.update=eager --set gradient_clipping=0
  run+=("${all_on_host[@]}" --set ballast.speculative_updates=24)
  step '1.5B, speculation' 60 "${run[@]}" --set gradient_clipping=0
  step '1.5B, speculation, clipped' 60 "${run[@]}" --set gradient_clipping=1
  on_gpu - 'update on the CPU' 40 "$bin/ballast" bench adam --json --params 256Mi --variant adamw-bf16 --seconds 2
  run=("${llama_8b[@]}" --layers 32 --sequence 2048 --steps 2 "${all_on_host[@]}"
    --set ballast.device_bytes=24GiB --set ballast.host_bytes=112GiB)
  step '8B in 24 GiB, 16 x 2' 150 "${run[@]}" --micro-batch 16 --accumulation 2
  step '8B in 24 GiB, 4 x 8' 150 "${run[@]}" --micro-batch 4 --accumulation 8
}

check_memory_and_races() {
  local rest='*CudaNorm*:*CudaRows*:*CudaGradients*:*CudaCodes*:*Tokens*:*SumLosses*:*CudaUpdate*'
  rest+=':*CudaMixers*:*CudaAttentionGate*:*CudaGroups*:*CudaLinks*:*CudaRotation*:*CudaRouter*'
  rest+=':*CudaExperts*:*CudaTokenSums*:*CudaRowSums*:*CudaBaseCodes*'
  sanitize memcheck attention 120 '*Attention*-*CudaAttentionGate*'
  sanitize racecheck attention 120 '*Attention*-*CudaAttentionGate*'
  conclude
  sanitize memcheck 'other kernels' 120 "$rest"
  sanitize racecheck 'other kernels' 120 "$rest"
  conclude
  sanitize synccheck 'all kernels' 120 "*Attention*:$rest"
  sanitize initcheck 'all kernels' 120 "*Attention*:$rest"
  conclude
}

if ! version=$("$bin/ballast" --version 2>&1); then
  report 'the program starts' FAILED 0 "$version"
else
  echo "$version"
fi
gpus=""
if command -v nvidia-smi >/dev/null; then
  gpus=$(nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader)
  echo "$gpus"
fi
python3 -B "$here/results.py" begin "$out/results.jsonl" "$part" "$version" "$gpus"
check_gpu
case $part in
  sanitize) check_memory_and_races ;;
  *) $part $half ;;
esac
echo "$part: $ok ok, $failed failed, $skipped skipped in $SECONDS s; results in $out/results.jsonl"
tar -C "$out" -czf "$out/$part$half-logs.tar.gz" "$part$half" && rm -rf "$logs"
if [ $failed -gt 0 ]; then exit 1; fi
if [ $ok -eq 0 ]; then exit 77; fi
exit 0
