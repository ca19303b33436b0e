#!/usr/bin/env python3
"""Writes small Qwen3 models whose matrices are in FP8, and the losses that transformers computes.

    python tests/data/make_fp8_fixture.py [OUTPUT_FOLDER]

Needs torch, transformers and safetensors; the build and the tests do not. It writes these files
to OUTPUT_FOLDER, or to fp8/ in the folder of this script:

    model/               a folder with scales for blocks of 128 x 128, like those that are released
    decoded.safetensors  `gate`, the matrix of a gate as transformers decodes it, and `codes`, the
                         values of all 256 codes
    tokens.u16           tokens of one sequence
    loss.json            cross-entropy of its tokens after the first, with bf16 weights in fp32
    matrices/            a smaller folder with a scale for each matrix and scales of activations
    matrices.json        the loss of that folder, whose dequantised matrices are in fp32
"""

import json
import pathlib
import sys

import safetensors.torch
import torch
import transformers
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

BLOCK, LENGTH, VOCABULARY = 128, 32, 23
CONFIG = {"vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 256,
          "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64,
          "max_position_embeddings": 64, "tie_word_embeddings": True, "bos_token_id": None,
          "eos_token_id": None, "pad_token_id": None}
QUANTIZATION = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
                "weight_block_size": [BLOCK, BLOCK]}
SMALLER = {"hidden_size": 48, "intermediate_size": 80, "head_dim": 16}
QUANTIZATION_OF_MATRICES = {"activation_scheme": "static", "dequantize": False,
                            "modules_to_not_convert": ["lm_head"], "quant_method": "fp8",
                            "weight_block_size": None}


def quantize(weight, dtype, block):
    """The codes of a matrix and the scales of its blocks, which are `block` rows and columns."""
    rows, columns = (extent // size for extent, size in zip(weight.shape, block))
    blocks = weight.float().reshape(rows, block[0], columns, block[1])
    scales = (blocks.abs().amax(dim=(1, 3)) / torch.finfo(torch.float8_e4m3fn).max).to(dtype)
    codes = (blocks / scales.float()[:, None, :, None]).to(torch.float8_e4m3fn)
    return codes.reshape(weight.shape), scales


def write_model(folder, config, quantization):
    """Writes a model with random weights. Returns its dequantised weights and its loss."""
    folder.mkdir(parents=True, exist_ok=True)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**config))
    blocks = quantization["weight_block_size"]
    stored, decoded = {}, {}
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        weight = (0.2 * torch.randn(parameter.shape)).to(torch.bfloat16)
        if not name.endswith("_proj.weight"):
            stored[name] = decoded[name] = weight
            continue
        scale_type = torch.bfloat16 if "down" in name else torch.float32
        codes, scales = quantize(weight, scale_type, blocks or weight.shape)
        if blocks is None:
            scales = scales.reshape(())
            stored[name.replace("weight", "activation_scale")] = torch.rand((), dtype=torch.bfloat16)
        stored[name], stored[name + "_scale_inv"] = codes, scales
        exact = torch.bfloat16 if blocks else torch.float32
        decoded[name] = Fp8Dequantize(None)._dequantize_one(codes, scales, exact)
    safetensors.torch.save_file(stored, folder / "model.safetensors", {"format": "pt"})
    text = json.loads(model.config.to_json_string())
    text.update({"dtype": "bfloat16", "quantization_config": quantization,
                 "architectures": ["Qwen3ForCausalLM"]})
    (folder / "config.json").write_text(json.dumps(text, indent=1) + "\n")
    model.load_state_dict(decoded, strict=False)
    return decoded, model.float()


def loss_of(model, tokens):
    with torch.no_grad():
        logits = model(input_ids=tokens[None]).logits[0]
    return torch.nn.functional.cross_entropy(logits[:-1].double(), tokens[1:]).item()


def main():
    torch.manual_seed(7)
    here = pathlib.Path(__file__).resolve().parent
    out = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else here / "fp8"
    decoded, model = write_model(out / "model", CONFIG, QUANTIZATION)
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    safetensors.torch.save_file({"gate": decoded["model.layers.0.mlp.gate_proj.weight"],
                                 "codes": codes.float()}, out / "decoded.safetensors")
    tokens = torch.randint(0, VOCABULARY, (LENGTH + 1,))
    (out / "tokens.u16").write_bytes(tokens.to(torch.uint16).numpy().tobytes())
    (out / "loss.json").write_text(json.dumps(loss_of(model, tokens)) + "\n")
    _, model = write_model(out / "matrices", {**CONFIG, **SMALLER}, QUANTIZATION_OF_MATRICES)
    (out / "matrices.json").write_text(json.dumps(loss_of(model, tokens)) + "\n")


if __name__ == "__main__":
    main()
