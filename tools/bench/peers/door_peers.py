#!/usr/bin/env python3
"""Times training steps of one small Llama through each way into Ballast, in turn, on the CPU.

    door_peers.py FOLDER [--width 256] [--layers 4] [--tokens 128] [--rounds 7] [--steps 5]

Needs ballast, torch and transformers. FOLDER is on the disk for optimizer states. All train the same shape
in fp32 with AdamW, two sequences a step, clipped to norm 1. In every round each takes its turn, with new
states and --steps steps after two that warm up. Prints medians of a step, and the median over the rounds of
the ratio to the plain loop.

- plain: a loop of PyTorch with torch.optim.AdamW.
- optimizer: the loop with OffloadAdamW, states in host memory.
- optimizer on nvme: the same, all states in FOLDER.
- offload: OffloadAdamW and ballast.offload() with room for two blocks. Its device is the fake one of the
  tests, whose copies are memory copies by a thread.
- aio: the plain loop, whose moments are read from FOLDER before each update and written after it, by
  ballast.aio.
- program: ballast.train() of the same shape on the host device, which has its own kernels.
"""

import argparse
import os
import pathlib
import statistics
import sys
import tempfile
import time

import ballast
import torch
from ballast import aio
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "tests/python"))
VOCABULARY, BATCH, WARM_UPS = 512, 2, 2


def make_model(arguments):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=arguments.width, intermediate_size=4 * arguments.width,
        num_hidden_layers=arguments.layers, num_attention_heads=4, num_key_value_heads=4,
        tie_word_embeddings=False))


def run_loop(arguments, model, optimizer, before=None, after=None):
    """Seconds per step. The callbacks surround the update."""
    seconds = []
    own_clip = isinstance(optimizer, ballast.OffloadOptimizer)
    for step in range(arguments.steps + WARM_UPS):
        ids = torch.randint(0, VOCABULARY, (BATCH, arguments.tokens),
                            generator=torch.Generator().manual_seed(step))
        start = time.perf_counter()
        model(input_ids=ids, labels=ids).loss.backward()
        if not own_clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if before and step > 0:
            before()
        optimizer.step()
        if after:
            after()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
    return seconds[WARM_UPS:]


def plain(arguments, _):
    model = make_model(arguments)
    return run_loop(arguments, model, torch.optim.AdamW(model.parameters(), lr=1e-3))


def optimizer(arguments, _, offloaded=False, **options):
    model = make_model(arguments)
    if offloaded:
        import fake_device
        fake_device.offload(model, fake_device.budget_of(model, 2))
    made = ballast.OffloadAdamW(model, lr=1e-3, max_grad_norm=1.0, threads=torch.get_num_threads(), **options)
    return run_loop(arguments, model, made)


def on_nvme(arguments, folder):
    return optimizer(arguments, folder, device="nvme", path=folder)


def offload(arguments, folder):
    return optimizer(arguments, folder, offloaded=True)


def with_aio(arguments, folder):
    model = make_model(arguments)
    made = torch.optim.AdamW(model.parameters(), lr=1e-3)
    whole = aio.empty(8 * sum(-(-p.numel() // 1024) * 1024 for p in model.parameters()))
    with aio.File(f"{folder}/moments.bin", "w", size=len(whole)) as file:
        def place():
            """Puts new moments into memory that begins at a page."""
            end = 0
            for parameter in model.parameters():
                state = made.state[parameter]
                for name in ("exp_avg", "exp_avg_sq"):
                    values = torch.frombuffer(whole, dtype=torch.float32, offset=end, count=parameter.numel())
                    state[name] = values.view_as(parameter).copy_(state[name])
                    end += -(-parameter.numel() // 1024) * 4096

        placed = []

        def write():
            if not placed:
                place()
                placed.append(True)
            file.write_from(whole).result()

        return run_loop(arguments, model, made, lambda: file.read_into(whole).result(), write)


def program(arguments, folder):
    text = pathlib.Path(folder, "text.txt")
    text.write_text("the quick brown fox jumps over the lazy dog. " * 4000, encoding="utf-8")
    seconds = []
    ballast.train({
        "model": {"family": "llama", "vocab_size": VOCABULARY, "hidden_size": arguments.width,
                  "intermediate_size": 4 * arguments.width, "num_layers": arguments.layers, "num_heads": 4,
                  "num_kv_heads": 4},
        "data": {"text": [str(text)], "sequence_length": arguments.tokens},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
        "gradient_clipping": 1.0, "bf16": {"enabled": False}, "train_micro_batch_size_per_gpu": BATCH,
        "ballast": {"device": "host", "device_bytes": "2GiB", "host_bytes": "2GiB", "save_weights": False,
                    "compute_threads": torch.get_num_threads(), "update_threads": torch.get_num_threads(),
                    "steps": arguments.steps + WARM_UPS}},
        out=f"{folder}/run", progress=False, callback=lambda record: seconds.append(record["step_seconds"]))
    return seconds[WARM_UPS:]


DOORS = {"plain": plain, "optimizer": optimizer, "optimizer on nvme": on_nvme, "offload": offload,
         "aio": with_aio, "program": program}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    for name, value in (("width", 256), ("layers", 4), ("tokens", 128), ("rounds", 7), ("steps", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    arguments = parser.parse_args()
    times = {name: [] for name in DOORS}
    for _ in range(arguments.rounds):
        for name, run in DOORS.items():
            with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
                times[name].append(statistics.median(run(arguments, folder)))
    parameters = sum(p.numel() for p in make_model(arguments).parameters())
    print(f"{parameters / 1e6:.1f}M parameters, {BATCH} x {arguments.tokens} tokens, {torch.get_num_threads()} "
          f"threads, {os.cpu_count()} cores, {arguments.rounds} rounds")
    for name, some in times.items():
        ratio = statistics.median(own / base for own, base in zip(some, times["plain"]))
        print(f"{name:18} {statistics.median(some) * 1e3:8.1f} ms, ratio {ratio:.2f}, "
              f"best {min(some) * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
