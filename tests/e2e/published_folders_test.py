#!/usr/bin/env python3
"""Fine-tunes small models with the config.json keys of published ones, and exports them.

    published_folders_test.py PATH_OF_BALLAST

published_configs.json has the keys and values of each config.json and the sizes that make the model
small; the weights are random.
"""

import json
import pathlib
import random
import struct

from runs import TINY, RunTest, main, write_file

PUBLISHED = pathlib.Path(__file__).resolve().parent.parent / "data" / "published_configs.json"


def shapes_of_mlp(config, prefix, h, wide, names=("gate_proj", "up_proj", "down_proj")):
    gate, up, down = (f"{prefix}{name}.weight" for name in names)
    return {gate: [wide, h], up: [wide, h], down: [h, wide]}


def shapes_of_experts(config, layer, h):
    kind, wide = config["model_type"], config["intermediate_size"]
    if kind == "gpt_oss":
        count, experts = config["num_local_experts"], layer + "mlp.experts."
        return {layer + "mlp.router.weight": [count, h], layer + "mlp.router.bias": [count],
                experts + "gate_up_proj": [count, h, 2 * wide],
                experts + "gate_up_proj_bias": [count, 2 * wide],
                experts + "down_proj": [count, wide, h], experts + "down_proj_bias": [count, h]}
    place, names = layer + "mlp.", ("gate_proj", "up_proj", "down_proj")
    if kind in ("mixtral", "minimax_m2"):
        place, names = layer + "block_sparse_moe.", ("w1", "w3", "w2")
    count = (config.get("num_experts") or config.get("num_local_experts") or
             config["n_routed_experts"])
    shapes = {place + "gate.weight": [count, h]}
    sigmoids = ("glm4_moe", "deepseek_v3", "glm4_moe_lite", "kimi_k2")
    if kind in sigmoids or kind == "minimax_m2":
        gate = "gate." if kind in sigmoids else ""
        shapes[f"{place}{gate}e_score_correction_bias"] = [count]
    if kind in sigmoids:
        shared = config["n_shared_experts"] * config["moe_intermediate_size"]
        shapes |= shapes_of_mlp(config, layer + "mlp.shared_experts.", h, shared)
    for expert in range(count):
        shapes |= shapes_of_mlp(config, f"{place}experts.{expert}.", h,
                                config.get("moe_intermediate_size", wide), names)
    if kind == "qwen2_moe":
        shapes |= {layer + "mlp.shared_expert_gate.weight": [1, h]}
        shapes |= shapes_of_mlp(config, layer + "mlp.shared_expert.", h,
                                config["shared_expert_intermediate_size"])
    return shapes


def shapes_of_latent_attention(config, place, h):
    heads, rank, inner = (config[key] for key in
                          ("num_attention_heads", "q_lora_rank", "kv_lora_rank"))
    plain, rotary, value = (config[key] for key in
                            ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    q = heads * (plain + rotary)
    shapes = {"kv_a_proj_with_mqa": [inner + rotary, h], "kv_a_layernorm": [inner],
              "kv_b_proj": [heads * (plain + value), inner], "o_proj": [h, heads * value]}
    shapes |= ({"q_a_proj": [rank, h], "q_a_layernorm": [rank], "q_b_proj": [q, rank]} if rank else
               {"q_proj": [q, h]})
    return {f"{place}{name}.weight": shape for name, shape in shapes.items()}


def shapes_of_attention(config, layer, h, q, kv):
    kind, place = config["model_type"], layer + "self_attn."
    if "kv_lora_rank" in config:
        return shapes_of_latent_attention(config, place, h)
    if kind == "phi3":
        return {place + "qkv_proj.weight": [q + 2 * kv, h], place + "o_proj.weight": [h, q]}
    shapes = {place + "q_proj.weight": [q, h], place + "k_proj.weight": [kv, h],
              place + "v_proj.weight": [kv, h], place + "o_proj.weight": [h, q]}
    if kind in ("qwen2", "qwen2_moe", "gpt_oss", "glm4_moe"):
        shapes |= {f"{place}{n}_proj.bias": [size] for n, size in (("q", q), ("k", kv), ("v", kv))}
    if kind == "gpt_oss":
        shapes |= {place + "o_proj.bias": [h], place + "sinks": [config["num_attention_heads"]]}
    if kind in ("qwen3", "qwen3_moe", "gemma3_text"):
        shapes |= {place + f"{n}_norm.weight": [config["head_dim"]] for n in "qk"}
    if kind in ("olmo2", "olmoe", "minimax_m2"):
        shapes |= {place + "q_norm.weight": [q], place + "k_norm.weight": [kv]}
    return shapes


def shapes_of_decoder(config):
    """Tensors of the families that derive from Llama."""
    kind, h, v = config["model_type"], config["hidden_size"], config["vocab_size"]
    heads, wide = config["num_attention_heads"], config["intermediate_size"]
    width = config.get("head_dim", h // heads)
    shapes = {"model.embed_tokens.weight": [v, h], "model.norm.weight": [h]}
    if not config.get("tie_word_embeddings", kind in ("gemma3_text", "smollm3")):
        shapes["lm_head.weight"] = [v, h]
    norms = ["input_layernorm", "post_attention_layernorm"]
    if kind == "olmo2":
        norms = ["post_attention_layernorm", "post_feedforward_layernorm"]
    elif kind == "gemma3_text":
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        shapes |= {f"{layer}{norm}.weight": [h] for norm in norms}
        shapes |= shapes_of_attention(config, layer, h, heads * width,
                                      config["num_key_value_heads"] * width)
        if "num_experts_per_tok" in config and i >= config.get("first_k_dense_replace", 0):
            shapes |= shapes_of_experts(config, layer, h)
        elif kind == "phi3":
            shapes |= {layer + "mlp.gate_up_proj.weight": [2 * wide, h],
                       layer + "mlp.down_proj.weight": [h, wide]}
        else:
            shapes |= shapes_of_mlp(config, layer + "mlp.", h, wide)
    return shapes


def with_biases(matrices, conv1d):
    """Name to [in, out]."""
    shapes = {}
    for name, (size_in, size_out) in matrices.items():
        shapes[name + ".weight"] = [size_in, size_out] if conv1d else [size_out, size_in]
        shapes[name + ".bias"] = [size_out]
    return shapes


def shapes_of_gpt(config):
    """Tensors of GPT-2 and GPT-NeoX."""
    gpt2 = config["model_type"] == "gpt2"
    h, v = config["n_embd" if gpt2 else "hidden_size"], config["vocab_size"]
    shapes = ({"transformer.wte.weight": [v, h], "transformer.wpe.weight": [config["n_positions"], h]}
              if gpt2 else {"gpt_neox.embed_in.weight": [v, h], "embed_out.weight": [v, h]})
    norms = ["transformer.ln_f" if gpt2 else "gpt_neox.final_layer_norm"]
    wide = 4 * h if gpt2 else config["intermediate_size"]
    for i in range(config["n_layer" if gpt2 else "num_hidden_layers"]):
        layer = f"transformer.h.{i}." if gpt2 else f"gpt_neox.layers.{i}."
        names = (["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"] if gpt2 else
                 ["attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h",
                  "mlp.dense_4h_to_h"])
        sizes = [(h, 3 * h), (h, h), (h, wide), (wide, h)]
        shapes |= with_biases({layer + n: size for n, size in zip(names, sizes)}, gpt2)
        norms += [layer + n for n in (("ln_1", "ln_2") if gpt2 else
                                      ("input_layernorm", "post_attention_layernorm"))]
    return shapes | {f"{n}.{part}": [h] for n in norms for part in ("weight", "bias")}


def random_weights(shapes):
    """BF16 values of random signs, between 2^-7 and 2^-5."""
    rng = random.Random(3)
    tensors = {}
    for name, shape in shapes.items():
        size = 1
        for extent in shape:
            size *= extent
        data = bytearray(rng.randbytes(2 * size))
        data[1::2] = bytes(0x3C | byte & 0x80 for byte in data[1::2])
        tensors[name] = ("BF16", shape, bytes(data))
    return tensors


def read_types(path):
    """Type and shape of each tensor."""
    data = path.read_bytes()
    header = json.loads(data[8:8 + struct.unpack("<Q", data[:8])[0]])
    return {name: (tensor["dtype"], tensor["shape"]) for name, tensor in header.items()
            if name != "__metadata__"}


class PublishedFolders(RunTest):
    def test_are_trained_and_exported(self):
        (self.path / "tokens.bin").write_bytes(
            bytes(value for i in range(400) for value in (i * 37 % 128, 0)))
        for published in json.loads(PUBLISHED.read_text()):
            with self.subTest(published["name"]):
                self.train_and_export(published["name"].replace("/", "-"),
                                      {**published["config"], **published["reduced"]})

    def train_and_export(self, name, config):
        for key in ("layer_types", "no_rope_layers"):
            if key in config:
                config[key] = config[key][:config["num_hidden_layers"]]
        folder, out = self.path / name, name + "-run"
        folder.mkdir()
        text = json.dumps(config, indent=1)
        (folder / "config.json").write_text(text)
        gpt = config["model_type"] in ("gpt2", "gpt_neox")
        shapes = shapes_of_gpt(config) if gpt else shapes_of_decoder(config)
        write_file(folder / "model.safetensors", random_weights(shapes))
        run = {**TINY, "model": {"path": name}, "zero_optimization": {"stage": 0},
               "data": {"tokens": ["tokens.bin"], "sequence_length": 16},
               "ballast": {**TINY["ballast"], "steps": 1, "out": out, "save_weights": True}}
        (self.path / "config.json").write_text(json.dumps(run))
        for arguments in (["train", "config.json"], ["export", out, "--out", out + "/folder"]):
            done = self.run_ballast(*arguments)
            self.assertEqual(done.returncode, 0, done.stderr)
        exported = self.path / out / "folder"
        self.assertEqual((exported / "config.json").read_text(), text)
        self.assertEqual(read_types(exported / "model.safetensors"),
                         {name: ("BF16", shape) for name, shape in shapes.items()})


if __name__ == "__main__":
    main()
