#!/usr/bin/env python3
"""Writes a small Qwen3 model whose matrices are in FP8, and the loss that transformers computes.

    python tests/data/make_fp8_fixture.py [OUTPUT_FOLDER]

Needs torch, transformers and safetensors; the build and the tests do not. It writes these files
to OUTPUT_FOLDER, or to fp8/ in the folder of this script:

    model/               a folder with scales for blocks of 128 x 128, like those that are released
    decoded.safetensors  `gate`, the matrix of a gate as transformers decodes it, and `codes`, the
                         values of all 256 codes
    tokens.u16           tokens of one sequence
    loss.json            cross-entropy of its tokens after the first, with bf16 weights in fp32
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


def quantize(weight, dtype):
    """The codes of a matrix and the scales of its blocks."""
    rows, columns = (extent // BLOCK for extent in weight.shape)
    blocks = weight.float().reshape(rows, BLOCK, columns, BLOCK)
    scales = (blocks.abs().amax(dim=(1, 3)) / torch.finfo(torch.float8_e4m3fn).max).to(dtype)
    codes = (blocks / scales.float()[:, None, :, None]).to(torch.float8_e4m3fn)
    return codes.reshape(weight.shape), scales


def main():
    torch.manual_seed(7)
    here = pathlib.Path(__file__).resolve().parent
    out = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else here / "fp8"
    (out / "model").mkdir(parents=True, exist_ok=True)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**CONFIG))
    stored, decoded = {}, {}
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        weight = (0.2 * torch.randn(parameter.shape)).to(torch.bfloat16)
        if not name.endswith("_proj.weight"):
            stored[name] = decoded[name] = weight
            continue
        scale_type = torch.bfloat16 if "down" in name else torch.float32
        codes, scales = quantize(weight, scale_type)
        stored[name], stored[name + "_scale_inv"] = codes, scales
        decoded[name] = Fp8Dequantize(None)._dequantize_one(codes, scales, torch.bfloat16)
    safetensors.torch.save_file(stored, out / "model/model.safetensors", {"format": "pt"})
    config = json.loads(model.config.to_json_string())
    config.update({"dtype": "bfloat16", "quantization_config": QUANTIZATION,
                   "architectures": ["Qwen3ForCausalLM"]})
    (out / "model/config.json").write_text(json.dumps(config, indent=1) + "\n")
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    safetensors.torch.save_file({"gate": decoded["model.layers.0.mlp.gate_proj.weight"],
                                 "codes": codes.float()}, out / "decoded.safetensors")
    model.load_state_dict(decoded, strict=False)
    tokens = torch.randint(0, VOCABULARY, (LENGTH + 1,))
    with torch.no_grad():
        logits = model.float()(input_ids=tokens[None]).logits[0]
    loss = torch.nn.functional.cross_entropy(logits[:-1].double(), tokens[1:]).item()
    (out / "tokens.u16").write_bytes(tokens.to(torch.uint16).numpy().tobytes())
    (out / "loss.json").write_text(json.dumps(loss) + "\n")


if __name__ == "__main__":
    main()
