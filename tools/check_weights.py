#!/usr/bin/env python3
"""Loads the saved weights of a run in transformers and computes the run's held-out loss with them.

    python tools/check_weights.py RUN

RUN is the run directory of `ballast train` with one file of data.text or data.tokens (tokens alone) and a
share data.held_out, or with one file of documents in data.eval, all of which was evaluated
(ballast.eval_batches). Documents are computed one by one, without packing. Needs torch and transformers. Computes in fp32, so the losses of a bf16 run differ by its rounding. Exit status 1 if
they differ by more than 1%.
"""

import json
import pathlib
import sys

try:
    import numpy
    import safetensors.numpy
    import torch
    import transformers
except ImportError as error:
    sys.exit(f"check_weights: {error}; this script needs the Python packages torch, transformers and "
             "safetensors")


def read_tokens(data, vocab_size):
    paths = data["text"] + data["tokens"]
    if len(paths) != 1 or not pathlib.Path(paths[0]).is_file():
        sys.exit(f"check_weights: needs one data file, got {', '.join(paths)}")
    kinds = {"u16": "<u2", "u32": "<u4", "auto": "<u2" if vocab_size <= 65536 else "<u4"}
    kind = "u1" if data["text"] else kinds[data["token_type"]]
    return numpy.fromfile(paths[0], dtype=kind).astype(numpy.int64)


def held_out_batches(config):
    """Inputs and targets of the micro-batches of an evaluation of one rank."""
    tokens = read_tokens(config["data"], config["model"]["vocab_size"])
    length = config["data"]["sequence_length"]
    sequences = config["train_micro_batch_size_per_gpu"]
    held = tokens[len(tokens) - int(len(tokens) * config["data"]["held_out"]):]
    whole = min(config["ballast"]["eval_batches"] * sequences, (len(held) - 1) // length)
    for first in range(0, whole, sequences):
        rows = min(sequences, whole - first)  # the last micro-batch may have fewer
        window = torch.from_numpy(held[first * length:(first + rows) * length + 1])
        yield window[:-1].view(rows, length), window[1:].view(rows, length)


def documents_one_by_one(config):
    """Inputs and targets of every document of data.eval. Longer documents are cut into pieces."""
    data = config["data"]
    length = data["sequence_length"]
    if len(data["eval"]) != 1:
        sys.exit("check_weights: needs one file in data.eval")
    tensors = safetensors.numpy.load_file(data["eval"][0])
    ids = torch.from_numpy(tensors["tokens"].astype(numpy.int64))
    trained = tensors.get("mask", numpy.ones(len(ids)))
    labels = torch.where(torch.from_numpy(trained != 0), ids, -100)
    offsets = tensors["documents"].astype(int)
    for start, end in zip(offsets[:-1], offsets[1:]):
        for first in range(start, end - 1, length):
            last = min(first + length, end - 1)
            yield ids[first:last][None], labels[first + 1:last + 1][None]


def main():
    if len(sys.argv) != 2:
        sys.exit("usage: check_weights.py RUN")
    run = pathlib.Path(sys.argv[1])
    config = json.loads((run / "config.json").read_text())
    # The planner may have chosen the micro-batch size.
    plan = json.loads((run / "run.json").read_text())["plan"]
    config["train_micro_batch_size_per_gpu"] = plan["micro_batch"]
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    ours = [step["eval_loss"] for step in steps if step.get("eval_loss") is not None]
    if not ours:
        sys.exit(f"check_weights: {run} has no held-out loss")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        run / "weights", dtype=torch.float32).eval()
    packed = bool(config["data"].get("documents"))
    total, count = 0.0, 0
    with torch.no_grad():
        for inputs, targets in (documents_one_by_one if packed else held_out_batches)(config):
            logits = model(input_ids=inputs, use_cache=False).logits.float()
            total += torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), targets.flatten(), reduction="sum").item()
            count += int((targets != -100).sum())
    theirs = total / count
    difference = abs(theirs - ours[-1]) / ours[-1]
    print(f"{type(model).__name__}: held-out loss {theirs:.5f} in transformers, {ours[-1]:.5f} in the "
          f"run, difference {100 * difference:.3f}%")
    sys.exit(difference > 0.01)


if __name__ == "__main__":
    main()
