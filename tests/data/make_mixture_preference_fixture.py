#!/usr/bin/env python3
"""Trains a tiny Qwen3-MoE with LoRA of attention, experts and routers on pairs by DPO in plain torch,
and writes what it computes.

    python -B tests/data/make_mixture_preference_fixture.py [OUTPUT_FOLDER]

Needs torch, transformers, peft, trl and datasets; the build and the tests do not. It writes into
mixture_preferences/ next to this script (or OUTPUT_FOLDER) the files of make_preference_fixture.py,
and initial.safetensors with the weights of the model. dpo.json also has `balance` by step.

A step trains on 2 micro-batches of 2 pairs as one batch: the mean of the pairs' losses +
router_aux_loss_coef * load_balancing_loss_func() of transformers, over the real tokens of the
trained model's pass. The reference is the model without adapters, which chooses its own experts. The
model is in double; transformers computes norms and softmaxes in fp32.
"""

import json
import pathlib
import sys

import peft
import safetensors.torch
import torch
import transformers

from make_preference_fixture import LENGTH, MICRO, PAIRS, STEPS, make_pairs, write_pairs
from make_router_loss_fixture import in_files, with_weights

HERE = pathlib.Path(__file__).resolve().parent
VOCAB, BALANCE, BETA, RATE = 131, 0.1, 0.3, 5e-3


def make_model():
    config = transformers.Qwen3MoeConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, intermediate_size=48, moe_intermediate_size=16,
        num_experts=6, num_experts_per_tok=2, norm_topk_prob=True, max_position_embeddings=32,
        rms_norm_eps=1e-6, output_router_logits=True, router_aux_loss_coef=BALANCE,
        mlp_only_layers=[1], tie_word_embeddings=False, attn_implementation="eager",
        experts_implementation="eager",
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    return with_weights(transformers.Qwen3MoeForCausalLM(config), seed=17, routers=0.3, others=0.2)


def batch_of(pairs):
    """Tokens, and masks of real tokens and of the completions, with rows as Ballast has them."""
    rows = [(pair["prompt_ids"], pair[key]) for pair in pairs for key in ("chosen_ids", "rejected_ids")]
    tokens = torch.zeros(len(rows), LENGTH, dtype=torch.long)
    real, trained = torch.zeros_like(tokens), torch.zeros_like(tokens)
    for i, (prompt, completion) in enumerate(rows):
        ids = (prompt + completion)[:LENGTH]
        tokens[i, :len(ids)] = torch.tensor(ids)
        real[i, :len(ids)] = 1
        trained[i, len(prompt):len(ids)] = 1
    return tokens, real, trained


def log_probabilities(output, tokens, trained):
    """Sum over the completion of each row."""
    each = output.logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
    return (each * trained[:, 1:]).sum(-1)


def step(model, optimizer, pairs):
    tokens, real, trained = batch_of(pairs)
    inputs = {"input_ids": tokens, "attention_mask": real, "use_cache": False}
    with torch.no_grad(), model.disable_adapter():
        reference = log_probabilities(model(**inputs), tokens, trained)
    output = model(**inputs)
    rewards = BETA * (log_probabilities(output, tokens, trained) - reference)
    chosen, rejected = rewards[0::2], rewards[1::2]
    loss = -torch.nn.functional.logsigmoid(chosen - rejected).mean()
    config = model.get_base_model().config
    auxiliary = transformers.models.qwen3_moe.modeling_qwen3_moe.load_balancing_loss_func(
        output.router_logits, config.num_experts, config.num_experts_per_tok, real)
    optimizer.zero_grad()
    (loss + BALANCE * auxiliary).backward()
    norm = sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None).sqrt()
    optimizer.step()
    return {"loss": loss.item(), "grad_norm": norm.item(), "balance": auxiliary.item(),
            "chosen": chosen.mean().item(), "rejected": rejected.mean().item(),
            "accuracy": (chosen > rejected).double().mean().item()}


def main():
    folder = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "mixture_preferences"
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    pairs = make_pairs()
    write_pairs(pairs, folder)
    base = make_model()
    safetensors.torch.save_file(in_files(dict(base.named_parameters())), folder / "initial.safetensors")
    lora = peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8,
                           target_modules=["q_proj", "v_proj", "o_proj"],
                           target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"])
    model = peft.get_peft_model(base, lora)
    generator = torch.Generator().manual_seed(7)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0.0, 0.05, generator=generator)
    model.save_pretrained(folder / "adapters")
    (folder / "adapters" / "README.md").unlink(missing_ok=True)
    model = model.double()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.0)
    each = MICRO * PAIRS
    steps = [step(model, optimizer, pairs[i * each:(i + 1) * each]) for i in range(STEPS)]
    record = {"model": {"family": "qwen3_moe", "vocab_size": VOCAB, "hidden_size": 32, "num_layers": 3,
                        "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "intermediate_size": 48,
                        "moe_intermediate_size": 16, "num_experts": 6, "num_experts_per_tok": 2,
                        "norm_topk_prob": True, "max_sequence": 32, "norm_epsilon": 1e-6,
                        "mlp_only_layers": [1], "output_router_logits": True,
                        "router_aux_loss_coef": BALANCE, "tie_embeddings": False,
                        "rope_scaling": {"rope_type": "default", "rope_theta": 10000.0}},
              "beta": BETA, "lr": RATE, "steps": steps, "sequence_length": LENGTH, "pairs": PAIRS,
              "micro_batches": MICRO,
              "made_with": {"torch": torch.__version__, "peft": peft.__version__,
                            "transformers": transformers.__version__}}
    (folder / "dpo.json").write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(steps[0]), json.dumps(steps[-1]))


if __name__ == "__main__":
    main()
