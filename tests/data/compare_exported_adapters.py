#!/usr/bin/env python3
"""Compare adapters that Ballast exports for models with experts, as PEFT loads them, with `--merged`.
Run it by hand:

    python tests/data/compare_exported_adapters.py PATH_OF_BALLAST [FAMILY ...]

It needs torch, transformers and peft. For each family it makes a small random model in which some
layers are dense, if the family has such layers, trains adapters of all linear maps for three steps,
and prints three losses in fp32: of the merged model, of PEFT's model with the exported adapters, and
of the base. The first two must be equal.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import warnings

os.environ["HF_HUB_OFFLINE"] = "1"
warnings.simplefilter("ignore")
del sys.path[0]  # this folder has one that is named like a module

import peft  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

COMMON = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
          "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 128,
          "tie_word_embeddings": False, "pad_token_id": None, "bos_token_id": None,
          "eos_token_id": None}
LATENT = {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 12, "qk_nope_head_dim": 8,
          "qk_rope_head_dim": 4, "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2,
          "moe_intermediate_size": 16, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
INDEXED = {**LATENT, "index_topk": 128, "index_head_dim": 8, "index_n_heads": 2}
SPARSE = {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
          "mlp_only_layers": [0]}
DELTA = {"layer_types": ["full_attention", "linear_attention"], "linear_num_key_heads": 2,
         "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
         "shared_expert_intermediate_size": 16}
FAMILIES = {
    "deepseek_v3": {**LATENT, "first_k_dense_replace": 1},
    "deepseek_v32": {**INDEXED, "first_k_dense_replace": 1},
    "glm4_moe": {"head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
                 "topk_group": 1, "moe_intermediate_size": 16, "n_shared_experts": 1,
                 "first_k_dense_replace": 1},
    "glm4_moe_lite": {**LATENT, "mlp_layer_types": ["dense", "sparse"]},
    "glm_moe_dsa": {**INDEXED, "mlp_layer_types": ["dense", "sparse"]},
    "mistral4": {**LATENT, "first_k_dense_replace": 1},
    "qwen2_moe": {**{k: v for k, v in SPARSE.items() if k != "head_dim"},
                  "shared_expert_intermediate_size": 16},
    "qwen3_moe": SPARSE,
    "qwen3_next": {**SPARSE, **DELTA},
    "qwen3_5_moe_text": {**{k: v for k, v in SPARSE.items() if k != "mlp_only_layers"}, **DELTA},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma4_text": {"head_dim": 8, "global_head_dim": 8, "enable_moe_block": True, "num_experts": 4,
                    "top_k_experts": 2, "moe_intermediate_size": 16, "hidden_size_per_layer_input": 0,
                    "num_kv_shared_layers": 0,
                    "layer_types": ["sliding_attention", "full_attention"]},
}


def class_of(config):
    """The class for generation of the family, which not all families have among the automatic ones."""
    name = type(config).__name__.removesuffix("TextConfig").removesuffix("Config")
    return getattr(transformers, f"{name}ForCausalLM")


def load(folder):
    config = transformers.AutoConfig.from_pretrained(folder)
    return class_of(config).from_pretrained(folder, dtype=torch.float32).eval()


def loss(model, tokens):
    with torch.no_grad():
        logits = model(tokens[None].long()).logits[0]
    return torch.nn.functional.cross_entropy(logits[:-1], tokens[1:].long()).item()


def run(*command):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    return done.stdout + done.stderr


def compare(ballast, family, keys, path):
    torch.manual_seed(5)
    config = transformers.AutoConfig.for_model(family, **{**COMMON, **keys})
    model = class_of(config)(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.15)
    model.save_pretrained(path / "model")
    tokens = torch.randint(0, COMMON["vocab_size"], (65,), dtype=torch.int32)
    (path / "tokens.bin").write_bytes(tokens.to(torch.uint16).numpy().tobytes())
    (path / "c.json").write_text(json.dumps({
        "model": {"path": str(path / "model")}, "train_batch_size": 1, "bf16": {"enabled": False},
        "data": {"tokens": str(path / "tokens.bin"), "token_type": "u16", "sequence_length": 64,
                 "held_out": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.02}},
        "ballast": {"steps": 3, "device": "host", "train": "adapters",
                    "adapters": {"targets": "all-linear", "rank": 4, "alpha": 16}}}))
    run(ballast, "train", path / "c.json", "--out", path / "run")
    run(ballast, "export", path / "run", "--out", path / "adapters")
    run(ballast, "export", path / "run", "--merged", "--out", path / "merged")
    adapted = peft.PeftModel.from_pretrained(load(path / "model"), path / "adapters").eval()
    losses = [loss(load(path / "merged"), tokens), loss(adapted, tokens),
              loss(load(path / "model"), tokens)]
    described = json.loads((path / "adapters/adapter_config.json").read_text())
    return losses, len(described.get("target_parameters") or [])


def main():
    ballast, *chosen = sys.argv[1:]
    differing = 0
    for family in chosen or FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            try:
                losses, parameters = compare(ballast, family, FAMILIES[family], pathlib.Path(folder))
            except Exception as error:  # noqa: BLE001
                differing += 1
                print(f"{family:18} FAILS     {type(error).__name__}: {error}"[:200], flush=True)
                continue
        merged, of_peft, base = losses
        equal = abs(merged - of_peft) < 1e-5
        differing += not equal
        print(f"{family:18} {'equal' if equal else 'DIFFERENT':9} merged {merged:.5f}, PEFT "
              f"{of_peft:.5f}, base {base:.5f}; {parameters} target_parameters", flush=True)
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
