#!/usr/bin/env python3
"""Makes a Hugging Face folder of a given size, with random weights, to measure import and export.

    large_folder.py DIR [--size 6GiB] [--hidden 3072] [--intermediate 8192] [--heads 24]
                    [--kv-heads 8] [--vocab 32000] [--shard-size 5GB] [--shift BYTES]

The model is a Llama in bf16. The number of layers follows from --size and is at least one. Values are random, finite and small (2^-9 to 2^-7 in magnitude), and repeat every 16 MiB. Files
are those that transformers writes: model-00001-of-0000N.safetensors with an index, or
model.safetensors, and config.json. The data of a file follow the header directly, which is
padded to a multiple of 8 bytes, so tensors start anywhere. --shift adds spaces to the header.
Needs only Python. DIR must not exist.
"""

import argparse
import json
import os
import pathlib
import re
import struct
import sys

SCALES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9,
          "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
BLOCK = 2**24


def size(text):
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", text)
    if not match or match[2].upper() not in SCALES:
        raise argparse.ArgumentTypeError(f"{text} is not a size such as 6GiB")
    return int(float(match[1]) * SCALES[match[2].upper()])


def layer(number, options):
    """Names and shapes of the tensors of a layer."""
    hidden, wide = options.hidden, options.intermediate
    keys = hidden // options.heads * options.kv_heads
    name = f"model.layers.{number}."
    return {name + "input_layernorm.weight": [hidden],
            name + "mlp.down_proj.weight": [hidden, wide],
            name + "mlp.gate_proj.weight": [wide, hidden],
            name + "mlp.up_proj.weight": [wide, hidden],
            name + "post_attention_layernorm.weight": [hidden],
            name + "self_attn.k_proj.weight": [keys, hidden],
            name + "self_attn.o_proj.weight": [hidden, hidden],
            name + "self_attn.q_proj.weight": [hidden, hidden],
            name + "self_attn.v_proj.weight": [keys, hidden]}


def count_bytes(shape):
    elements = 1
    for extent in shape:
        elements *= extent
    return 2 * elements


def choose_layers(options):
    one = sum(map(count_bytes, layer(0, options).values()))
    others = 2 * count_bytes([options.vocab, options.hidden]) + count_bytes([options.hidden])
    return max(1, round((options.size - others) / one))


def name_tensors(layers, options):
    tensors = {"lm_head.weight": [options.vocab, options.hidden],
               "model.embed_tokens.weight": [options.vocab, options.hidden]}
    for number in range(layers):
        tensors.update(layer(number, options))
    tensors["model.norm.weight"] = [options.hidden]
    return tensors


def split(tensors, largest):
    files, used = [{}], 0
    for name, shape in tensors.items():
        if files[-1] and used + count_bytes(shape) > largest:
            files.append({})
            used = 0
        files[-1][name] = shape
        used += count_bytes(shape)
    return files


def random_block():
    """bf16 values: any sign and fraction, and one of two exponents."""
    block = bytearray(os.urandom(BLOCK))
    block[1::2] = block[1::2].translate(bytes((byte & 0x80) | 0x3b for byte in range(256)))
    return memoryview(bytes(block))


def write_file(path, tensors, values, shift):
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in tensors.items():
        begin, end = end, end + count_bytes(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8 + shift)
    with open(path, "xb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        left = end
        while left > 0:
            left -= file.write(values[:min(left, len(values))])
        file.flush()
        os.fsync(file.fileno())
    return end


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", metavar="DIR", type=pathlib.Path)
    parser.add_argument("--size", type=size, default="6GiB")
    for name, value in (("hidden", 3072), ("intermediate", 8192), ("heads", 24), ("kv-heads", 8),
                        ("vocab", 32000), ("shift", 0)):
        parser.add_argument("--" + name, type=int, default=value)
    parser.add_argument("--shard-size", type=size, default="5GB")
    options = parser.parse_args()
    if options.hidden % options.heads or options.heads % options.kv_heads:
        parser.error("--hidden must be a multiple of --heads, and --heads of --kv-heads")
    layers = choose_layers(options)
    files = split(name_tensors(layers, options), options.shard_size)
    values = random_block()
    try:
        options.folder.mkdir(parents=True)
    except OSError as error:
        sys.exit(f"large_folder.py: cannot make {options.folder}: {error.strerror}")
    total, weight_map = 0, {}
    for number, tensors in enumerate(files, 1):
        name = (f"model-{number:05}-of-{len(files):05}.safetensors" if len(files) > 1
                else "model.safetensors")
        total += write_file(options.folder / name, tensors, values, options.shift)
        weight_map.update(dict.fromkeys(tensors, name))
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (options.folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    (options.folder / "config.json").write_text(json.dumps({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama",
        "hidden_size": options.hidden, "intermediate_size": options.intermediate,
        "num_hidden_layers": layers, "num_attention_heads": options.heads,
        "num_key_value_heads": options.kv_heads, "vocab_size": options.vocab,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
        "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16"}, indent=2))
    print(f"{options.folder}: {total} bytes of weights ({total / 2**30:.2f} GiB), {layers} layers, "
          f"{len(files)} file{'s' if len(files) > 1 else ''}")


if __name__ == "__main__":
    main()
