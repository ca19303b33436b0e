#!/usr/bin/env python3
"""Measures training steps of others on one GPU, for tools/gpu_check.sh.

    gpu_peers.py --method lora|qlora|fsdp --model FOLDER [--device cuda|cpu] [--sequence 2048]
                 [--micro-batch 2] [--accumulation 4] [--steps 3]

The model is the class of transformers that config.json in FOLDER names, with random weights in
bf16, sdpa attention, and the tokens of `ballast bench step`. Prints a JSON array with one row.

lora: adapters of rank 16 on all linear layers by PEFT, kept in fp32 under autocast, fused AdamW, no
    recomputation. Compare with `ballast bench step --set ballast.train=adapters`.
qlora: lora with the linear layers of the base in NF4 by bitsandbytes.
fsdp: full training by FSDP2 on one rank, with CPUOffloadPolicy (fp32 weights, gradients and AdamW in
    host memory, fused AdamW on the CPU), bf16 products, recomputed layers.

Needs torch and transformers; peft; bitsandbytes for qlora. Not yet run on a GPU.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time

import torch
from torch import nn
from torch.nn import functional

from step_torch import CLIP, OPTIMIZER, WARM_UPS, micro_batches, wait_for

RANK = 16


def read_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--method", choices=("lora", "qlora", "fsdp"), required=True)
    parser.add_argument("--model", required=True, metavar="FOLDER")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    for name, value in (("sequence", 2048), ("micro-batch", 2), ("accumulation", 4), ("steps", 3)):
        parser.add_argument(f"--{name}", type=int, default=value, metavar="N")
    return parser.parse_args()


def make_model(a, dtype):
    """Returns the model of the folder on the CPU, or for adapters on the device."""
    import transformers
    config = transformers.AutoConfig.from_pretrained(a.model)
    config.use_cache = False
    with torch.device("cpu" if a.method == "fsdp" else a.device):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa",
                                                              dtype=dtype)
    return model.train()


def quantise(model, device):
    """Replaces the linear layers of the body by bitsandbytes' in NF4."""
    import bitsandbytes
    for module in list(model.model.modules()):
        for name, layer in list(module.named_children()):
            if not isinstance(layer, nn.Linear):
                continue
            codes = bitsandbytes.nn.Linear4bit(layer.in_features, layer.out_features, bias=False,
                                               compute_dtype=torch.bfloat16, quant_type="nf4")
            codes.weight = bitsandbytes.nn.Params4bit(layer.weight.data.cpu(), requires_grad=False,
                                                      quant_type="nf4")
            setattr(module, name, codes.to(device))
    model.is_loaded_in_4bit = True  # what PEFT asks


def adapted(a):
    import peft
    model = make_model(a, torch.bfloat16)
    if a.method == "qlora":
        quantise(model, a.device)
    settings = peft.LoraConfig(r=RANK, lora_alpha=RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(model, settings)


def sharded(a):
    """Returns the model under FSDP2 with all states in host memory."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
    store = tempfile.NamedTemporaryFile()
    kind = "cpu:gloo,cuda:nccl" if a.device == "cuda" else "gloo"
    torch.distributed.init_process_group(kind, rank=0, world_size=1, init_method=f"file://{store.name}.store")
    mesh = torch.distributed.init_device_mesh(a.device, (1,))
    offload = CPUOffloadPolicy() if a.device == "cuda" else OffloadPolicy()
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = make_model(a, torch.float32)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision, offload_policy=offload)
    return fully_shard(model, mesh=mesh, mp_policy=precision, offload_policy=offload)


def train_step(a, model, weights, optimizer, batches):
    """Returns the mean loss, as the host has it after the step."""
    total = 0.0
    for inputs, targets in batches:
        with torch.autocast(a.device, torch.bfloat16, enabled=a.method != "fsdp"):
            logits = model(input_ids=inputs).logits
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()) / len(batches)
        loss.backward()
        total += loss.detach()
    nn.utils.clip_grad_norm_(weights, CLIP)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(total)


def main():
    a = read_arguments()
    if a.device == "cuda" and not torch.cuda.is_available():
        sys.exit("gpu_peers: error: torch sees no GPU")
    model = sharded(a) if a.method == "fsdp" else adapted(a)
    with open(os.path.join(a.model, "config.json"), encoding="utf-8") as file:
        vocab = json.load(file)["vocab_size"]
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, fused=True, **OPTIMIZER)
    batches = micro_batches({"accumulation": a.accumulation, "micro_batch": a.micro_batch,
                             "sequence": a.sequence, "vocab": vocab}, a.device)
    seconds = []
    for _ in range(WARM_UPS + a.steps):
        wait_for(a.device)
        start = time.perf_counter()
        loss = train_step(a, model, weights, optimizer, batches)
        wait_for(a.device)
        seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds[WARM_UPS:])
    tokens = a.accumulation * a.micro_batch * a.sequence
    print(json.dumps([{"method": a.method, "tokens": tokens, "trained": sum(w.numel() for w in weights),
                       "median_seconds": median, "tokens_per_second": tokens / median, "loss": loss,
                       "device_bytes": torch.cuda.max_memory_allocated() if a.device == "cuda" else None,
                       "version": torch.__version__}]))
    if a.method == "fsdp":
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
