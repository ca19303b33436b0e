#!/usr/bin/env python3
"""Compare `ballast export --merged` with PEFT for a matrix of kinds of adapters. Run it by hand:

    python3 tests/data/compare_merged_adapters.py --ballast build/tools/ballast

It needs torch, transformers and peft. For each small model and each LoraConfig it trains nothing but
adds random numbers to what would be trained, saves the adapters, merges them with PEFT and with
Ballast, and compares all tensors, the loss, and whether the embeddings are tied. A merge of PEFT
that computes something else than its adapters (tied embeddings with LoRA) must be refused.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TQDM_DISABLE"] = "1"
warnings.simplefilter("ignore")
sys.path.pop(0)  # this folder has one called bitsandbytes

import torch  # noqa: E402
import transformers  # noqa: E402
from peft import LoraConfig, PeftModel, get_peft_model  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 128,
         "num_key_value_heads": 2, "max_position_embeddings": 64, "intermediate_size": 24}
Q = ["q_proj"]
LLAMA = {
    "list": {"target_modules": ["q_proj", "down_proj"]},
    "all_linear": {"target_modules": "all-linear"},
    "regex": {"target_modules": r".*\.layers\.\d+\.self_attn\.(q|v)_proj"},
    "regex_patterns": {"target_modules": r".*\.(q|v)_proj", "rank_pattern": {"v_proj": 4},
                       "alpha_pattern": {"q_proj": 32}},
    "patterns_of_paths": {"target_modules": ["q_proj", "v_proj", "up_proj"],
                          "rank_pattern": {r"^model\.layers\.0\.self_attn\.q_proj": 3,
                                           "self_attn.v_proj": 5},
                          "alpha_pattern": {r"layers\.1\..*": 3, "up_proj": 11}},
    "patterns_in_order": {"target_modules": ["q_proj", "v_proj"],
                          "alpha_pattern": {".*_proj": 5, "q_proj": 50}, "rank_pattern": {"j": 7}},
    "alternatives": {"target_modules": ["q_proj", "k_proj"],
                     "alpha_pattern": {"q_proj|o_proj": 5, "(?:k)_proj": 2.5}},
    "rslora_patterns": {"target_modules": ["q_proj", "v_proj"], "use_rslora": True,
                        "rank_pattern": {"v_proj": 4}, "alpha_pattern": {"v_proj": 3}},
    "dora_patterns": {"target_modules": ["q_proj", "v_proj"], "use_dora": True,
                      "rank_pattern": {"v_proj": 4}, "alpha_pattern": {"v_proj": 3}},
    "layers": {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [1]},
    "layer": {"target_modules": Q, "layers_to_transform": 0, "layers_pattern": "layers"},
    "exclude": {"target_modules": ["q_proj", "v_proj"], "exclude_modules": r".*layers\.0.*"},
    "rslora": {"target_modules": Q, "use_rslora": True},
    "dora": {"target_modules": Q, "use_dora": True},
    "bias_all": {"target_modules": Q, "bias": "all"},
    "bias_lora_only": {"target_modules": Q, "bias": "lora_only"},
    "lora_bias": {"target_modules": Q, "lora_bias": True},
    "norms": {"target_modules": Q, "modules_to_save": ["norm", "input_layernorm"]},
    "embed": {"target_modules": Q, "modules_to_save": ["embed_tokens"]},
    "head": {"target_modules": Q, "modules_to_save": ["lm_head"]},
    "both": {"target_modules": Q, "modules_to_save": ["lm_head", "embed_tokens"]},
    "embed_tie": {"target_modules": Q, "modules_to_save": ["embed_tokens"],
                  "ensure_weight_tying": True},
    "head_tie": {"target_modules": Q, "modules_to_save": ["lm_head"], "ensure_weight_tying": True},
    "lora_head": {"target_modules": ["q_proj", "lm_head"]},
    "lora_embed": {"target_modules": ["q_proj", "embed_tokens"]},
    "lora_both": {"target_modules": ["embed_tokens", "lm_head"]},
    "lora_both_tie": {"target_modules": ["embed_tokens", "lm_head"], "ensure_weight_tying": True},
    "dora_head": {"target_modules": ["lm_head"], "use_dora": True},
    "dora_embed": {"target_modules": ["embed_tokens"], "use_dora": True},
    "rslora_embed": {"target_modules": ["embed_tokens"], "use_rslora": True,
                     "alpha_pattern": {"embed_tokens": 3}},
    "head_and_saved_embed": {"target_modules": ["lm_head"], "modules_to_save": ["embed_tokens"]},
    "tokens": {"target_modules": Q, "trainable_token_indices": [7, 1, 127]},
    "tokens_of_both": {"target_modules": Q, "trainable_token_indices": {"embed_tokens": [1, 5],
                                                                      "lm_head": [2]}},
    "tokens_tie": {"target_modules": Q, "ensure_weight_tying": True,
                   "trainable_token_indices": {"embed_tokens": [1, 5], "lm_head": [1, 5]}},
    "gaussian": {"target_modules": Q, "init_lora_weights": "gaussian"},
    "orthogonal": {"target_modules": Q, "init_lora_weights": "orthogonal"},
    "pissa": {"target_modules": Q, "init_lora_weights": "pissa"},
    "olora": {"target_modules": Q, "init_lora_weights": "olora"},
    "mica": {"target_modules": Q, "init_lora_weights": "mica"},
    "dropout": {"target_modules": Q, "lora_dropout": 0.3},
}
GPT2 = {
    "list": {"target_modules": ["c_attn"], "fan_in_fan_out": True},
    "square": {"target_modules": ["attn.c_proj"], "fan_in_fan_out": True},
    "dora": {"target_modules": ["c_attn", "attn.c_proj"], "fan_in_fan_out": True, "use_dora": True},
    "lora_bias": {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True,
                  "lora_bias": True},
    "bias_all": {"target_modules": ["c_attn"], "fan_in_fan_out": True, "bias": "all"},
    "bias_lora_only": {"target_modules": ["c_attn"], "fan_in_fan_out": True, "bias": "lora_only"},
    "embed": {"target_modules": ["c_attn"], "modules_to_save": ["wte"], "fan_in_fan_out": True},
    "head": {"target_modules": ["c_attn"], "modules_to_save": ["lm_head"], "fan_in_fan_out": True},
    "lora_head": {"target_modules": ["c_attn", "lm_head"], "fan_in_fan_out": True},
    "lora_positions": {"target_modules": ["wpe"], "fan_in_fan_out": True},
    "tokens": {"target_modules": ["c_attn"], "trainable_token_indices": {"wte": [3, 4]},
               "fan_in_fan_out": True},
}
EXPERTS = {
    "attention": {"target_modules": ["q_proj", "o_proj"]},
    "all_linear": {"target_modules": "all-linear"},
    "parameters": {"target_modules": Q, "target_parameters": ["mlp.experts.down_proj"]},
}


def models():
    llama = {"bos_token_id": 1, "eos_token_id": 2, **SIZES}
    tied = {"tie_word_embeddings": True}
    yield "llama", transformers.LlamaConfig(**llama), LLAMA, torch.float32
    yield "llama_tied", transformers.LlamaConfig(**llama, **tied), LLAMA, torch.float32
    yield "llama_bf16", transformers.LlamaConfig(**llama), LLAMA, torch.bfloat16
    biased = {"attention_bias": True, "mlp_bias": True}
    yield "llama_biases", transformers.LlamaConfig(**llama, **biased), LLAMA, torch.float32
    yield "qwen2_tied_bf16", transformers.Qwen2Config(**SIZES, **tied), LLAMA, torch.bfloat16
    small = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 128, "n_positions": 64}
    yield "gpt2", transformers.GPT2Config(**small), GPT2, torch.float32
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    yield "qwen3_moe", transformers.Qwen3MoeConfig(**SIZES, **experts), EXPERTS, torch.float32
    trinity = {"num_dense_layers": 1, "num_shared_experts": 1, "head_dim": 8}
    yield "afmoe", transformers.AfmoeConfig(**SIZES, **experts, **trinity), EXPERTS, torch.float32
    command = {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "pad_token_id": 0,
               "bos_token_id": 1, "eos_token_id": 2}
    yield "cohere2_moe", transformers.Cohere2MoeConfig(**SIZES, **command), EXPERTS, torch.float32


def loss(model, ids):
    with torch.no_grad():
        return model.eval()(input_ids=ids, labels=ids).loss.item()


def make(base, kind, folder, dtype):
    """Saves random adapters; returns the loss of the model with them, and PEFT's merged model."""
    ids = torch.arange(96).reshape(2, 48) % 128
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    model = get_peft_model(model, LoraConfig(r=2, lora_alpha=8, task_type="CAUSAL_LM", **kind))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.add_(torch.randn_like(parameter) * 0.05)
    trained = loss(model, ids)
    model.save_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    merged = PeftModel.from_pretrained(model, folder).merge_and_unload()
    return trained, merged, ids


def compare(ballast, base, kind, folder, dtype):
    """One word for the outcome, and why."""
    trained, merged, ids = make(base, kind, folder / "adapter", dtype)
    out = folder / "merged"
    done = subprocess.run([ballast, "export", folder / "adapter", "--merged", "--out", out],
                          capture_output=True, text=True, check=False)
    theirs = loss(merged, ids)
    honest = abs(theirs - trained) < (1e-4 if dtype == torch.float32 else 2e-2)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        line = "one line" if len(lines) == 1 else "NOT ONE LINE"
        return "refused", f"{line}: {lines[-1]}" + ("" if honest else " (PEFT's merge differs)")
    ours = transformers.AutoModelForCausalLM.from_pretrained(out)
    mine, expected = ours.state_dict(), merged.state_dict()
    for name, tensor in expected.items():
        if mine[name].dtype != tensor.dtype:
            return "DIFFERENT", f"{name} is {mine[name].dtype}, PEFT's {tensor.dtype}"
        error = (mine[name].float() - tensor.float()).abs().max().item()
        scale = tensor.float().abs().max().item()
        if error > scale * (2e-6 if dtype == torch.float32 else 2.0**-7):  # PEFT rounds some products first
            return "DIFFERENT", f"{name} by {error:.2g} of {scale:.2g}"
    if ours.config.tie_word_embeddings != merged.config.tie_word_embeddings:
        return "DIFFERENT", f"tie_word_embeddings {ours.config.tie_word_embeddings}"
    files = {name for file in out.glob("*.safetensors") for name in load_file(file)}
    if ours.config.tie_word_embeddings and "lm_head.weight" in files:
        return "DIFFERENT", "a tied model with an output matrix"
    if not honest:
        return "DIFFERENT", f"PEFT's merge {theirs:.5f}, its adapters {trained:.5f}"
    return "equal", f"loss {loss(ours, ids):.5f}, PEFT {theirs:.5f}, its adapters {trained:.5f}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ballast", required=True, help="the program")
    parser.add_argument("--only", default="", help="part of MODEL/KIND")
    arguments = parser.parse_args()
    different = 0
    with tempfile.TemporaryDirectory() as temporary:
        for name, config, kinds, dtype in models():
            base = Path(temporary) / name / "base"
            torch.manual_seed(0)
            config.initializer_range = 0.2
            model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
            model.save_pretrained(base, max_shard_size="20KB" if name == "llama" else "5GB")
            for kind, settings in kinds.items():
                if arguments.only not in f"{name}/{kind}":
                    continue
                try:
                    with contextlib.redirect_stderr(None):
                        outcome, why = compare(arguments.ballast, base, settings,
                                               Path(temporary) / name / kind, dtype)
                except Exception as error:  # pylint: disable=broad-except
                    outcome, why = "PEFT fails", f"{type(error).__name__}: {error}"[:150]
                different += outcome == "DIFFERENT"
                print(f"{name + '/' + kind:32} {outcome:10} {why}".replace(temporary + "/", ""),
                      flush=True)
    sys.exit(different > 0)


if __name__ == "__main__":
    main()
