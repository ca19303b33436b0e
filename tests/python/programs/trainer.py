"""Trains with transformers.Trainer and Ballast's optimizer.

    python trainer.py OUTPUT_DIRECTORY
"""

import sys

import ballast
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=2))
text = torch.tensor(list(open(__file__, "rb").read()))
data = [{"input_ids": piece, "labels": piece} for piece in text[: len(text) // 64 * 64].split(64)]
trainer = Trainer(
    model=model,
    args=TrainingArguments(sys.argv[1], max_steps=20, per_device_train_batch_size=4,
                           learning_rate=3e-3, logging_steps=5, report_to=[], use_cpu=True),
    train_dataset=data,
    optimizer_cls_and_kwargs=(ballast.OffloadAdamW, {"lr": 3e-3}),
)
trainer.train()
print(f"loss {trainer.state.log_history[0]['loss']} -> {trainer.state.log_history[-2]['loss']}")
