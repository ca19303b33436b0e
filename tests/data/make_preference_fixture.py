#!/usr/bin/env python3
"""Trains a tiny Llama with LoRA on pairs by DPOTrainer of TRL and writes what it computes.

    python -B tests/data/make_preference_fixture.py [OUTPUT_FOLDER]

Needs torch, transformers, peft, trl and datasets; the build and the tests do not. It writes into
preferences/ beside this script (or OUTPUT_FOLDER):

    pairs.safetensors   the pairs, as tools/prepare.py --pairs writes them; some are cut
    adapters/           the adapters at the beginning, as PEFT writes them; their B are random
    dpo.json            by step: loss, grad_norm, and rewards (chosen, rejected, accuracy)

The model is that of training/llama.json with the weights training/llama.initial.safetensors. A step
has 2 micro-batches of 2 pairs, in the order of the file, in fp32, without clipping.
"""

import json
import pathlib
import random
import sys
import tempfile

import datasets
import peft
import safetensors.torch
import tokenizers
import torch
import transformers
import trl

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent / "tools"))
from preparing import command as prepare  # noqa: E402
from make_training_fixtures import llama_config  # noqa: E402

STEPS, MICRO, PAIRS, LENGTH, VOCAB = 10, 2, 2, 24, 131
BETA = 0.2
RATE = 5e-3


def make_pairs():
    source = random.Random(5)
    draw = lambda low, high: [source.randrange(2, VOCAB) for _ in range(source.randint(low, high))]
    return [{"prompt_ids": draw(2, 9), "chosen_ids": draw(1, 18) + [1],
             "rejected_ids": draw(1, 18) + [1]} for _ in range(STEPS * MICRO * PAIRS)]


def write_pairs(pairs, folder):
    metadata = prepare.metadata_of("made up", {"tokenizer_sha256": ""}, "completion", True)
    with prepare.DocumentWriter(folder / "pairs.safetensors", False, metadata) as writer:
        for pair in pairs:
            for key in ("chosen_ids", "rejected_ids"):
                prompt = pair["prompt_ids"]
                writer.add(prompt + pair[key], [0] * len(prompt) + [1] * len(pair[key]))
        writer.finish()


class InOrder(trl.DPOTrainer):
    """Takes the pairs as they are, in their order."""

    def _prepare_dataset(self, dataset, *_, **__):
        return dataset

    def _get_train_sampler(self, *_, **__):
        return torch.utils.data.SequentialSampler(self.train_dataset)


def main():
    folder = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "preferences"
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    pairs = make_pairs()
    write_pairs(pairs, folder)
    initial = HERE / "training" / "llama.initial.safetensors"
    reference = json.loads((HERE / "training" / "llama.json").read_text())
    model = transformers.LlamaForCausalLM(llama_config(False, reference["model"]["rope_theta"])).float()
    model.load_state_dict(safetensors.torch.load_file(initial))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel(
            {"<pad>": 0, "</s>": 1, "<unk>": 2}, unk_token="<unk>")),
        pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
    lora = peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8,
                           target_modules=["q_proj", "v_proj", "down_proj"])
    with tempfile.TemporaryDirectory() as scratch:
        arguments = trl.DPOConfig(
            output_dir=scratch, per_device_train_batch_size=PAIRS, gradient_accumulation_steps=MICRO,
            max_steps=STEPS, learning_rate=RATE, lr_scheduler_type="constant", weight_decay=0.0,
            adam_beta1=0.9, adam_beta2=0.95, adam_epsilon=1e-6, max_grad_norm=1e9, beta=BETA,
            max_length=LENGTH, logging_steps=1, save_strategy="no", report_to=[], bf16=False,
            use_cpu=True, gradient_checkpointing=False, disable_dropout=True, seed=3)
        trainer = InOrder(model=model, args=arguments, processing_class=tokenizer,
                          train_dataset=datasets.Dataset.from_list(pairs), peft_config=lora)
        generator = torch.Generator().manual_seed(7)
        for name, parameter in trainer.model.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_(0.0, 0.05, generator=generator)
        trainer.model.save_pretrained(folder / "adapters")
        (folder / "adapters" / "README.md").unlink(missing_ok=True)
        trainer.train()
        logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    steps = [{"loss": entry["loss"], "grad_norm": entry["grad_norm"],
              "chosen": entry["rewards/chosen"], "rejected": entry["rewards/rejected"],
              "accuracy": entry["rewards/accuracies"]} for entry in logs]
    document = {"model": reference["model"], "beta": BETA, "lr": RATE, "steps": steps,
                "sequence_length": LENGTH, "pairs": PAIRS, "micro_batches": MICRO,
                "made_with": {"trl": trl.__version__, "torch": torch.__version__,
                              "peft": peft.__version__, "transformers": transformers.__version__}}
    (folder / "dpo.json").write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(steps[:2]), json.dumps(steps[-1]))


if __name__ == "__main__":
    main()
