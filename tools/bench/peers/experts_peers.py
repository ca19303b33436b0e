#!/usr/bin/env python3
"""Times training steps of a mixture of experts and of transformers' own Qwen3-MoE, in turn.

    experts_peers.py [--rounds 3] [--experts grouped_mm,eager] [--ballast build/tools/ballast]
                     [--hidden 1024 --layers 4 --count 32 --chosen 4 --width 512 --tokens 512
                      --sequences 2]

Needs torch and transformers. Both train the same model in bf16 from random weights on random
tokens: forward and backward pass of one micro-batch, clipping by the global norm, AdamW with fp32
masters (torch: fused, gradients and weights copied). `--experts`: transformers' implementations of
the experts. `--adapters RANK` trains LoRA of attention and all experts alone, transformers with PEFT.
Prints tokens/s and the median of the ratios of the rounds.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import time

VOCABULARY = 32000
HEADS, KV_HEADS, HEAD = 16, 4, 64
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--experts", default="grouped_mm,eager")
    parser.add_argument("--ballast", default="build/tools/ballast")
    for name, value in (("hidden", 1024), ("layers", 4), ("count", 32), ("chosen", 4),
                        ("width", 512), ("tokens", 512), ("sequences", 2)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--adapters", type=int, default=0, metavar="RANK")
    parser.add_argument("--peer", help=argparse.SUPPRESS)  # one measured process
    return parser.parse_args()


def measure_transformers(asked):
    import torch
    import transformers

    config = transformers.Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=asked.hidden, num_hidden_layers=asked.layers,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD,
        num_experts=asked.count, num_experts_per_tok=asked.chosen,
        moe_intermediate_size=asked.width, norm_topk_prob=True, tie_word_embeddings=False)
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16).train()
    model.set_experts_implementation(asked.peer)
    if asked.adapters:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(
            task_type="CAUSAL_LM", r=asked.adapters, target_modules=ATTENTION,
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]))
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    masters = [torch.nn.Parameter(w.detach().float()) for w in weights]
    optimizer = torch.optim.AdamW(masters, lr=1e-4, fused=True)
    ids = torch.randint(VOCABULARY, (asked.sequences, asked.tokens))
    times = []
    for step in range(asked.steps + 2):
        start = time.perf_counter()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        for master, weight in zip(masters, weights):
            master.grad = weight.grad.float()
            weight.grad = None
        torch.nn.utils.clip_grad_norm_(masters, 1.0, foreach=True)
        optimizer.step()
        with torch.no_grad():
            for master, weight in zip(masters, weights):
                weight.copy_(master)
        if step >= 2:
            times.append(time.perf_counter() - start)
    print(json.dumps({"seconds": statistics.median(times),
                      "parameters": sum(w.numel() for w in model.parameters())}))


def measure_ballast(asked):
    settings = {"num_experts": asked.count, "num_experts_per_tok": asked.chosen,
                "moe_intermediate_size": asked.width, "norm_topk_prob": "true", "head_dim": HEAD}
    command = [asked.ballast, "bench", "step", "--family", "qwen3_moe", "--vocab", VOCABULARY,
               "--hidden", asked.hidden, "--layers", asked.layers, "--heads", HEADS, "--kv-heads",
               KV_HEADS, "--intermediate", 3 * asked.hidden, "--sequence", asked.tokens,
               "--micro-batch", asked.sequences, "--accumulation", 1, "--steps", asked.steps,
               "--json"]
    for key, value in settings.items():
        command += ["--set", f"model.{key}={value}"]
    if asked.adapters:
        adapters = {"rank": asked.adapters,
                    "targets": [*ATTENTION, "experts.gate_up_proj", "experts.down_proj"]}
        command += ["--set", "ballast.train=adapters", "--set", f"ballast.adapters={json.dumps(adapters)}"]
    done = subprocess.run([str(word) for word in command], check=True, stdout=subprocess.PIPE)
    row = json.loads(done.stdout)[0]
    return row["step_seconds"]


def main():
    asked = arguments()
    if asked.peer:
        return measure_transformers(asked)
    tokens = asked.tokens * asked.sequences
    ratios = {peer: [] for peer in asked.experts.split(",")}
    for _ in range(asked.rounds):
        own = measure_ballast(asked)
        for peer, found in ratios.items():
            done = subprocess.run([sys.executable, pathlib.Path(__file__), *sys.argv[1:], "--peer",
                                   peer], check=True, stdout=subprocess.PIPE, text=True)
            theirs = json.loads(done.stdout.splitlines()[-1])
            found.append(theirs["seconds"] / own)
            print(f"{theirs['parameters'] / 1e6:.0f}M parameters, {tokens} tokens: Ballast "
                  f"{tokens / own:.0f} tokens/s, transformers {peer} "
                  f"{tokens / theirs['seconds']:.0f} tokens/s, {found[-1]:.2f}x", flush=True)
    for peer, found in ratios.items():
        print(f"{peer}: {statistics.median(found):.2f}x ({min(found):.2f} to {max(found):.2f})")


if __name__ == "__main__":
    main()
