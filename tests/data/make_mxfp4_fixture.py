#!/usr/bin/env python3
"""Writes a small GPT-OSS model whose experts are in MXFP4, and what transformers decodes from it.

    python tests/data/make_mxfp4_fixture.py [OUTPUT_FOLDER]

Needs torch, transformers and safetensors; the build and the tests do not. It writes into mxfp4/
beside this script (or OUTPUT_FOLDER):

    model/                 a folder like that of the released models: config.json, and two files of
                           weights, where scales are in another file than their codes
    decoded.safetensors    the experts' matrices as transformers decodes them, under the names that
                           they have in folders of bf16; `blocks` and `scales` with every scale that
                           is a number, and `decoded`
"""

import json
import pathlib
import sys

import safetensors.torch
import torch
import transformers
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

EXPERTS, WIDTH, INNER = 3, 64, 32
CONFIG = {
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
    "eos_token_id": None, "experts_per_token": 2, "head_dim": 8, "hidden_act": "silu",
    "hidden_size": WIDTH, "initial_context_length": 16, "initializer_range": 0.02,
    "intermediate_size": INNER, "layer_types": ["sliding_attention", "full_attention"],
    "max_position_embeddings": 64, "model_type": "gpt_oss", "num_attention_heads": 4,
    "num_experts_per_tok": 2, "num_hidden_layers": 2, "num_key_value_heads": 2,
    "num_local_experts": EXPERTS, "output_router_logits": False, "pad_token_id": None,
    "quantization_config": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router",
                                   "model.embed_tokens", "lm_head"],
        "quant_method": "mxfp4"},
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 4.0,
                     "original_max_position_embeddings": 16, "rope_type": "yarn", "truncate": False},
    "rope_theta": 1500, "router_aux_loss_coef": 0.9, "sliding_window": 8, "swiglu_limit": 7.0,
    "tie_word_embeddings": False, "transformers_version": "4.55.0.dev0", "use_cache": True,
    "vocab_size": 23}


def random_codes(rows, columns, least, most):
    blocks = torch.randint(0, 256, (EXPERTS, rows, columns // 32, 16), dtype=torch.uint8)
    scales = torch.randint(least, most + 1, (EXPERTS, rows, columns // 32), dtype=torch.uint8)
    return blocks, scales


def weights():
    keys = {key: value for key, value in CONFIG.items()
            if key not in ("quantization_config", "rope_scaling", "rope_theta", "architectures")}
    config = transformers.GptOssConfig(
        **keys, rope_parameters={**CONFIG["rope_scaling"], "rope_theta": CONFIG["rope_theta"]})
    model = transformers.GptOssForCausalLM(config)
    found = {}
    for name, parameter in model.named_parameters():
        if not name.endswith(("gate_up_proj", "down_proj")):
            found[name] = (0.2 * torch.randn(parameter.shape)).to(torch.bfloat16)
    return found


def main():
    torch.manual_seed(3)
    here = pathlib.Path(__file__).resolve().parent
    folder = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else here / "mxfp4"
    (folder / "model").mkdir(parents=True, exist_ok=True)
    first, second, decoded = weights(), {}, {}
    for layer in range(CONFIG["num_hidden_layers"]):
        for name, rows, columns in (("gate_up_proj", 2 * INNER, WIDTH), ("down_proj", WIDTH, INNER)):
            name = f"model.layers.{layer}.mlp.experts.{name}"
            blocks, scales = random_codes(rows, columns, 121, 125)
            first[name + "_blocks"], second[name + "_scales"] = blocks, scales
            decoded[name] = convert_moe_packed_tensors(blocks, scales)
    decoded["blocks"] = torch.randint(0, 256, (1, 255, 1, 16), dtype=torch.uint8)
    decoded["scales"] = torch.arange(255, dtype=torch.uint8).reshape(1, 255, 1)
    decoded["decoded"] = convert_moe_packed_tensors(decoded["blocks"], decoded["scales"])
    safetensors.torch.save_file(decoded, folder / "decoded.safetensors")
    files = {"model-00001-of-00002.safetensors": first, "model-00002-of-00002.safetensors": second}
    for file, tensors in files.items():
        safetensors.torch.save_file(tensors, folder / "model" / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, tensors in files.items()
                                            for name in sorted(tensors)}}
    (folder / "model" / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    (folder / "model" / "config.json").write_text(json.dumps(CONFIG, indent=1) + "\n")


if __name__ == "__main__":
    main()
