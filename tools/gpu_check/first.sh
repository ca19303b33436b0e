# The part `first`: what the first minutes on a GPU should settle, in two halves of seven and five
# minutes. Sourced by tools/gpu_check.sh.

# Kernels that no GPU has run, and attention.
new_kernels='*CudaMixers*:*CudaAttentionGate*:*CudaGroups*:*CudaLinks*:*CudaRotation*:*CudaRouter*'
new_kernels+=':*CudaExperts*:*CudaTokenSums*:*CudaRowSums*:*CudaBaseCodes*:*Attention*'

# Before all else where there are several GPUs.
several_gpus() {
  if [ -n "$no_gpu" ] || [ "$(count_gpus)" -lt 2 ]; then return; fi
  export BALLAST_TEST_DEVICE=cuda BALLAST_MPI_MODULE=$top/lib/ballast_mpi.so
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
  check 'copies between GPUs' 30 "$bin/gpu_device" --gtest_filter='*OtherGpu*'
  on_gpu mpirun 'collectives of 2 ranks' 60 mpirun -n 2 "$bin/conformance_comm"
  on_gpu mpirun 'tensor parallelism, 2 ranks' 60 mpirun -n 2 "$bin/e2e_ranks_matrix" --gtest_filter='RanksTensor.*'
  step '1.5B on two GPUs' 45 "${llama_1_5b[@]}" --micro-batch 4 --accumulation 4 --steps 2 \
    --set pipeline.stages=2
}

# The devices of a plan on one GPU, with heads for which products of warpgroups and cuDNN exist. The
# number of devices must not change a bit.
devices_of_a_plan() {
  local heads run
  for heads in 128 64; do
    run=(--family llama --vocab 4096 --hidden 512 --layers 4 --heads $((512 / heads)) --kv-heads 2
      --intermediate 1536 --sequence 512 --micro-batch 2 --accumulation 2 --steps 2
      --set ballast.device_bytes=2GiB)
    step "heads of $heads, one device" 20 "${run[@]}"
    step "heads of $heads, two devices" 20 "${run[@]}" --set pipeline.stages=2 --set 'ballast.devices=[0,0]'
    on_gpu - "heads of $heads, equal bits" 5 python3 -B "$here/results.py" same "$out/results.jsonl" \
      "$part" loss "heads of $heads, one device" "heads of $heads, two devices"
  done
}

first_half() {
  local run
  several_gpus
  on_gpu - doctor 20 "$bin/ballast" doctor
  launch_on_gpu - 'kernels, 8 processes' 75 8 "$bin/gpu_kernels" --gtest_filter="$new_kernels"
  conclude
  export BALLAST_TEST_DEVICE=cuda
  launch_on_gpu - 'families, 8 processes' 75 8 "$bin/gpu_families_on_cuda"
  launch_on_gpu - "PyTorch's runs, 4 processes" 75 4 "$bin/gpu_pytorch_parity_on_cuda"
  conclude
  launch_on_gpu - 'invariance, 6 processes' 60 6 "$bin/gpu_invariance_on_cuda"
  conclude
  devices_of_a_plan
  run='*CudaMixers*short*:*CudaLinks*:*CudaGroups*:Attention*.NothingIsWritten*'
  sanitize memcheck 'new kernels' 45 "$run"
  sanitize racecheck 'new kernels' 45 "$run"
  conclude
  step '8B in 24 GiB, 16 x 2' 110 "${llama_8b[@]}" --layers 32 --sequence 2048 --micro-batch 16 \
    --accumulation 2 --steps 2 "${all_on_host[@]}" --set ballast.device_bytes=24GiB \
    --set ballast.host_bytes=112GiB
  run=("${llama_8b[@]}" --layers 8 --sequence 8192 --micro-batch 4 --accumulation 1 --steps 2
    "${all_on_host[@]}")
  step '8 layers, gated updates' 30 "${run[@]}" --set ballast.speculative_updates=0
  step '8 layers, speculation' 30 "${run[@]}" --set ballast.speculative_updates=15 --set gradient_clipping=0
  step '8 layers, speculation, clipped' 30 "${run[@]}" --set ballast.speculative_updates=15 \
    --set gradient_clipping=1
}

attention_rates() {
  local size length
  for size in 64 128 192 256 512; do
    for length in 4096 16384; do
      if [ "$size" -eq 512 ] && [ "$length" -gt 4096 ]; then continue; fi
      on_gpu - "attention, $length, heads of $size" 10 "$bin/ballast" bench attention --json \
        --sequence "$length" --micro-batch 1 --heads 32 --kv-heads 8 --head-size "$size" \
        --repeats 3 --seconds 0.3
    done
  done
}

# Training of adapters, and others' on the same card and shape.
adapters_against_peers() {
  local run peer folder=$logs/llama_8b
  run=("${llama_8b[@]}" --layers 8 --sequence 2048 --micro-batch 2 --accumulation 4 --steps 3)
  step 'LoRA, 8 layers of 8B' 25 "${run[@]}" "${lora[@]}"
  step 'QLoRA, 8 layers of 8B' 25 "${run[@]}" "${lora[@]}" --set ballast.quantized_base=nf4
  write_llama_8b "$folder" 8
  peer=("$top/tools/bench/peers/gpu_peers.py" --model "$folder" --sequence 2048 --micro-batch 2
    --accumulation 4 --steps 3)
  with_modules 'torch transformers peft' 'LoRA by PEFT' 35 python3 -B "${peer[@]}" --method lora
  with_modules 'torch transformers peft bitsandbytes' 'QLoRA by PEFT' 35 python3 -B "${peer[@]}" --method qlora
}

second_half() {
  local run
  attention_rates
  run=("${qwen3_5[@]}" --layers 8 --sequence 16384 --micro-batch 1 --accumulation 1)
  step "Qwen3.5's form, 8 layers" 40 "${run[@]}" --steps 2
  on_gpu ncu "kernels of Qwen3.5's form" 45 ncu --metrics gpu__time_duration.sum --launch-count 400 \
    "$bin/ballast" bench step --device cuda "${qwen3_5[@]}" --layers 4 --sequence 16384 --micro-batch 1 \
    --accumulation 1 --steps 1
  step "GLM-4.7-Flash's form, 4 layers" 30 "${glm_flash[@]}" --layers 4 --sequence 4096 \
    --micro-batch 4 --accumulation 1 --steps 2
  step "Gemma 4's form, 6 layers" 30 "${gemma4[@]}" --layers 6 --sequence 4096 --micro-batch 2 \
    --accumulation 1 --steps 2
  run=("${llama_1_5b[@]}" --micro-batch 16 --accumulation 2 --steps 3)
  step '1.5B, first choices of products' 30 "${run[@]}" --set ballast.product_algorithms=heuristic
  step '1.5B, timed products' 30 "${run[@]}" --set ballast.product_algorithms=timed
  adapters_against_peers
  write_llama_8b "$logs/llama_2.8b" 8
  with_modules torch '2.8B by FSDP2, all on the host' 55 python3 -B "$top/tools/bench/peers/gpu_peers.py" \
    --model "$logs/llama_2.8b" --method fsdp --sequence 2048 --micro-batch 4 --accumulation 4 --steps 2
}

first() { # [HALF]
  case ${1:-all} in
    1) first_half ;;
    2) second_half ;;
    all)
      first_half
      second_half
      ;;
  esac
}
