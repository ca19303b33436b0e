#!/usr/bin/env python3
"""Computes the router losses of one batch of a tiny Qwen3-MoE in transformers, and their gradients.

    python -B tests/data/make_router_loss_fixture.py [OUTPUT_FOLDER]

Needs torch, transformers and safetensors; the build and the tests do not. It writes into
router_losses/ next to this script (or OUTPUT_FOLDER):

    batch.safetensors   fp32: the initial weights, and gradient.X of the trained loss
    batch.json          `model` (keys of Ballast's model section), `tokens` of the 8 sequences, and of
                        the whole batch `loss` (cross-entropy), `aux_loss` and `z_loss`; `mean_aux_loss`
                        by the number of equal parts of the batch: the mean of their auxiliary losses

The trained loss is cross-entropy + router_aux_loss_coef * load_balancing_loss_func() of transformers
+ router_z_loss_coef * z_loss, over the router logits of all layers and sequences at once. z_loss is
the mean of their squared log-sums (ST-MoE, 2022, equation 5). The model is in double; transformers
computes norms and softmaxes in fp32.
"""

import json
import pathlib
import sys

import safetensors.torch
import torch
import transformers
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

HERE = pathlib.Path(__file__).resolve().parent
SEQUENCES, LENGTH, VOCAB = 8, 12, 61
BALANCE, Z = 0.5, 0.05


def make_model():
    config = transformers.Qwen3MoeConfig(
        vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, intermediate_size=24, moe_intermediate_size=8,
        num_experts=6, num_experts_per_tok=2, norm_topk_prob=True, max_position_embeddings=32,
        rms_norm_eps=1e-6, output_router_logits=True, router_aux_loss_coef=BALANCE,
        tie_word_embeddings=False, attn_implementation="eager", experts_implementation="eager",
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    return with_weights(transformers.Qwen3MoeForCausalLM(config), seed=11, routers=0.4, others=0.3)


def with_weights(model, seed, routers, others):
    """Gives the model random weights: norms near 1, and matrices with these standard deviations."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        spread = torch.randn(parameter.shape, generator=generator)
        size = routers if name.endswith("mlp.gate.weight") else others
        parameter.data = 1 + 0.1 * spread if parameter.dim() == 1 else size * spread
    return model.eval()


def in_files(tensors):
    """Each expert has its own tensors, as in folders of Qwen3-MoE."""
    found = {}
    for name, tensor in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            for e, both in enumerate(tensor):
                for part, half in zip(("gate_proj", "up_proj"), both.chunk(2)):
                    found[name.replace("gate_up_proj", f"{e}.{part}.weight")] = half
        elif name.endswith("experts.down_proj"):
            for e, one in enumerate(tensor):
                found[name.replace("down_proj", f"{e}.down_proj.weight")] = one
        else:
            found[name] = tensor
    return {name: tensor.float().contiguous().clone() for name, tensor in found.items()}


def balance(config, logits):
    return load_balancing_loss_func(logits, config.num_experts, config.num_experts_per_tok)


def main():
    folder = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "router_losses"
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    model = make_model()
    tensors = in_files(dict(model.named_parameters()))
    model = model.double()
    # Sequences of few ids, so that parts of the batch choose different experts.
    generator = torch.Generator().manual_seed(3)
    tokens = torch.stack([torch.randint(0, VOCAB, (5,), generator=generator)[
        torch.randint(0, 5, (LENGTH + 1,), generator=generator)] for _ in range(SEQUENCES)])
    output = model(input_ids=tokens[:, :-1], use_cache=False)
    # By layer [sequences, tokens, experts].
    logits = [one.view(SEQUENCES, LENGTH, -1) for one in output.router_logits]
    whole = tuple(one.flatten(0, 1) for one in logits)
    loss = torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), tokens[:, 1:].flatten())
    auxiliary = balance(model.config, whole)
    z_loss = torch.cat(whole).logsumexp(-1).square().mean()
    (loss + BALANCE * auxiliary + Z * z_loss).backward()
    means = {}
    for parts in (1, 2, 4, 8):
        each = zip(*[one.chunk(parts) for one in logits])
        means[parts] = sum(balance(model.config, tuple(one.flatten(0, 1) for one in part)).item()
                           for part in each) / parts
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    tensors.update({"gradient." + name: value for name, value in in_files(gradients).items()})
    safetensors.torch.save_file(tensors, folder / "batch.safetensors")
    record = {"model": {"family": "qwen3_moe", "vocab_size": VOCAB, "hidden_size": 16, "num_layers": 2,
                        "num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "intermediate_size": 24,
                        "moe_intermediate_size": 8, "num_experts": 6, "num_experts_per_tok": 2,
                        "norm_topk_prob": True, "max_sequence": 32, "norm_epsilon": 1e-6,
                        "output_router_logits": True, "router_aux_loss_coef": BALANCE,
                        "router_z_loss_coef": Z, "tie_embeddings": False,
                        "rope_scaling": {"rope_type": "default", "rope_theta": 10000.0}},
              "tokens": tokens.tolist(), "loss": loss.item(), "aux_loss": auxiliary.item(),
              "z_loss": z_loss.item(), "mean_aux_loss": means,
              "made_with": {"torch": torch.__version__, "transformers": transformers.__version__}}
    (folder / "batch.json").write_text(json.dumps(record) + "\n")
    print({key: record[key] for key in ("loss", "aux_loss", "z_loss", "mean_aux_loss")})


if __name__ == "__main__":
    main()
