#!/usr/bin/env python3
"""Writes a small Llama whose matrices bitsandbytes has quantised, as transformers saves it, adapters that peft has
made over it, and what transformers computes from them.

    python tests/data/make_bitsandbytes_fixture.py [OUTPUT_FOLDER]

Needs torch, transformers, peft, bitsandbytes and safetensors; the build and the tests do not. It writes into
bitsandbytes/ beside this script (or OUTPUT_FOLDER):

    nf4/          matrices of layers in NF4, in two files
    nested/       the same with double quantization
    int8/         LLM.int8
    adapters/     LoRA over nested/, as peft saves it
    expected.safetensors
                  FOLDER/NAME: the matrices of the first layer as bitsandbytes decodes them, in bf16
    expected.json
                  ids [2, 17], and by folder (and "adapters") the mean loss of predicting ids[:, 1:] from the rest,
                  which transformers computes in fp32 from the decoded weights
"""

import copy
import json
import pathlib
import shutil
import sys
import tempfile

import bitsandbytes.functional as F
import peft
import safetensors.torch
import torch
import transformers

CONFIG = transformers.LlamaConfig(
    vocab_size=40, hidden_size=32, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64)
METHODS = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nested": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True,
               "bnb_4bit_compute_dtype": torch.bfloat16},
    "int8": {"load_in_8bit": True},
}


def decode_nf4(parameter):
    """As one row: the kernel of bitsandbytes 0.50 for CPUs takes wrong scales where a block of 64 goes on in the next
    row (with 32 columns its error is five times that of the codes). Encoding has no rows."""
    state = copy.copy(parameter.quant_state)
    shape, state.shape = state.shape, torch.Size([1, state.shape.numel()])
    return F.dequantize_4bit(parameter.data, state).reshape(shape)


def decoded(model):
    """bf16 weights by name."""
    found = {}
    for name, parameter in model.named_parameters():
        module = model.get_submodule(name.rpartition(".")[0])
        if getattr(parameter, "quant_state", None) is not None:
            found[name] = decode_nf4(parameter)
        elif parameter.dtype == torch.int8:
            found[name] = F.int8_vectorwise_dequant(parameter.data, module.weight.SCB).bfloat16()
        else:
            found[name] = parameter.data
    return found


def loss_of(weights, ids, adapters=None):
    model = transformers.LlamaForCausalLM(CONFIG).float()
    model.load_state_dict({name: value.float() for name, value in weights.items()})
    if adapters is not None:
        model = peft.PeftModel.from_pretrained(model, adapters)
    with torch.no_grad():
        logits = model(ids[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).item()


def make_adapters(model, folder):
    made = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"],
                                                      task_type="CAUSAL_LM"))
    for name, parameter in made.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(0, 0.2)
    made.save_pretrained(folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = "../nested"
    config["target_modules"].sort()
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    (folder / "README.md").unlink(missing_ok=True)


def main():
    torch.manual_seed(5)
    here = pathlib.Path(__file__).resolve().parent
    folder = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else here / "bitsandbytes"
    ids = torch.randint(0, CONFIG.vocab_size, (2, 17))
    expected, tensors = {"ids": ids.tolist(), "loss": {}}, {}
    with tempfile.TemporaryDirectory() as base:
        first = transformers.LlamaForCausalLM(CONFIG)
        for parameter in first.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(0, 0.3)
        first.bfloat16().save_pretrained(base)
        for name, method in METHODS.items():
            model = transformers.LlamaForCausalLM.from_pretrained(
                base, quantization_config=transformers.BitsAndBytesConfig(**method), dtype=torch.bfloat16,
                device_map="cpu")
            shutil.rmtree(folder / name, ignore_errors=True)
            model.save_pretrained(folder / name, max_shard_size="14KB" if name == "nf4" else "1GB")
            (folder / name / "generation_config.json").unlink(missing_ok=True)
            weights = decoded(model)
            expected["loss"][name] = loss_of(weights, ids)
            tensors.update({f"{name}/{tensor}": value for tensor, value in weights.items() if "layers.0" in tensor and "_proj" in tensor})
            if name == "nested":
                make_adapters(model, folder / "adapters")
                expected["loss"]["adapters"] = loss_of(weights, ids, folder / "adapters")
    safetensors.torch.save_file(tensors, folder / "expected.safetensors")
    (folder / "expected.json").write_text(json.dumps(expected) + "\n")


if __name__ == "__main__":
    main()
