#!/usr/bin/env python3
"""Trains a small model with transformers' Trainer on masked labels: the reference for the mean over
the tokens that count.

    python tests/data/make_masked_fixture.py [OUTPUT_FOLDER]

Needs torch, transformers, accelerate, safetensors and numpy; the build and the tests do not. Starts
from training/llama.initial.safetensors and writes training/llama_masked.json:

    batch      steps, micro_batches (of a step), sequences (of a micro-batch), length
    optimizer  AdamW's lr (constant), betas, eps, weight_decay; clip: largest norm of the gradient
    trained    per step and sequence, a character per token: 1 where the token is trained on as a
               target
    loss       per step, as Trainer logs it: the sum over the tokens that are trained on in all
               micro-batches of the step, divided by their number (its num_items_in_batch)
    grad_norm  per step, before clipping

Sequence i has the tokens [i * length, (i + 1) * length) of training/tokens.u16.bin. The shares of
trained tokens differ from micro-batch to micro-batch; some micro-batches have one such token, some
have none. With one micro-batch per process and average_tokens_across_devices, several processes
compute the same.
"""

import json
import pathlib
import sys
import tempfile

import numpy
import safetensors.torch
import torch
import transformers

from make_training_fixtures import VOCAB, llama_config

STEPS, MICRO, SEQUENCES, LENGTH = 8, 4, 2, 37
OPTIMIZER = {"lr": 4e-3, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.1, "clip": 1.0}
SHARES = [0.02, 0.9, 0.35, 0.0]


def make_mask():
    """[STEPS, MICRO, SEQUENCES, LENGTH]; the first token of a sequence is never a target."""
    generator = numpy.random.default_rng(77)
    mask = numpy.zeros((STEPS, MICRO, SEQUENCES, LENGTH), dtype=bool)
    for step in range(STEPS):
        for micro, share in enumerate(numpy.roll(SHARES, step)):
            mask[step, micro] = generator.random((SEQUENCES, LENGTH)) < share
            if share == SHARES[0]:
                mask[step, micro, 0, 5] = True
    mask[..., 0] = False
    return mask


class Recorder(transformers.TrainerCallback):
    """Trainer rounds what it logs, so losses are taken before."""

    def __init__(self):
        self.norms = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "grad_norm" in logs:
            self.norms.append(float(logs["grad_norm"]))


class Exact(transformers.Trainer):
    """Keeps the loss of each micro-batch, which is its sum over num_items_in_batch."""

    losses = None

    def training_step(self, *arguments, **keywords):
        loss = super().training_step(*arguments, **keywords)
        self.losses.append(float(loss))
        return loss


def train(folder, mask):
    tokens = numpy.fromfile(folder / "tokens.u16.bin", dtype="<u2").astype(numpy.int64)
    count = STEPS * MICRO * SEQUENCES
    inputs = tokens[:count * LENGTH].reshape(count, LENGTH)
    labels = numpy.where(mask.reshape(count, LENGTH), inputs, -100)
    samples = [{"input_ids": torch.tensor(i), "labels": torch.tensor(l)}
               for i, l in zip(inputs, labels)]
    model = transformers.LlamaForCausalLM(llama_config(False, 10000.0))
    model.load_state_dict(safetensors.torch.load_file(folder / "llama.initial.safetensors"))
    o = OPTIMIZER
    optimizer = torch.optim.AdamW(model.parameters(), lr=o["lr"], betas=o["betas"], eps=o["eps"],
                                  weight_decay=o["weight_decay"], foreach=False)
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    with tempfile.TemporaryDirectory() as output:
        arguments = transformers.TrainingArguments(
            output_dir=output, per_device_train_batch_size=SEQUENCES,
            gradient_accumulation_steps=MICRO, max_steps=STEPS, max_grad_norm=o["clip"],
            logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, seed=1,
            train_sampling_strategy="sequential", disable_tqdm=True)
        recorder = Recorder()
        trainer = Exact(model=model, args=arguments, train_dataset=samples,
                        optimizers=(optimizer, constant), callbacks=[recorder])
        trainer.losses = []
        trainer.train()
    losses = numpy.array(trainer.losses).reshape(STEPS, MICRO).sum(axis=1)
    return losses.tolist(), recorder.norms


def main():
    torch.set_num_threads(1)
    here = pathlib.Path(__file__).resolve().parent / "training"
    out = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else here
    mask = make_mask()
    losses, norms = train(here, mask)
    reference = {
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "batch": {"steps": STEPS, "micro_batches": MICRO, "sequences": SEQUENCES, "length": LENGTH,
                  "vocabulary": VOCAB},
        "optimizer": OPTIMIZER,
        "trained": [["".join("01"[int(t)] for t in sequence) for micro in step for sequence in micro]
                    for step in mask],
        "loss": losses,
        "grad_norm": norms,
    }
    (out / "llama_masked.json").write_text(json.dumps(reference, indent=1) + "\n")


if __name__ == "__main__":
    main()
