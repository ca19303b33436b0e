#!/usr/bin/env python3
"""Changes keys of config.json, one and two at a time, and compares Ballast with transformers.

    python tests/data/make_folder_fixture.py BALLAST [--pairs N] [--only FAMILY ...] [--out FILE]

Needs torch, transformers 5 and safetensors, and the program BALLAST; the build and the tests do not.
For each family it sets, removes and misplaces the keys of transformers' config class and of other
classes in the config.json of a tiny random model. Weights depend on names and shapes alone. Each
folder's loss in transformers (fp32, eager attention) is compared with that of `ballast eval`, which
may also refuse the folder if its message names a key that was changed.

It prints a table and writes folder_configs.jsonl, one line per family:

    "family", "config"  model_type and the config.json before the changes
    "model"             the keys of the model section that Ballast makes of it
    "counts"            number of keys, and of folders by result
    "without_effect"    key: values that change neither the section nor transformers' loss
    "refused"           key: values that Ballast refuses by the key's name
    "equal"             [changes, changed keys of the section]: Ballast has transformers' loss
    "refused_with"      [changes, the key that Ballast's message names, or null]

Changes are keys with their values; a key with a "-" before it is removed. Folders that transformers
refuses but Ballast reads are counted only.
"""

import argparse
import collections
import copy
import dataclasses
import hashlib
import itertools
import json
import math
import pathlib
import random
import subprocess
import tempfile
import warnings

import safetensors.torch
import torch
import transformers

from make_family_fixtures import weights

T, VOCAB = 48, 96
TOLERANCE = 2e-4  # of a loss of about 5; changes that matter move it by more
BASE = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 8,
        "num_key_value_heads": 2, "intermediate_size": 24, "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5, "hidden_act": "silu", "pad_token_id": None, "bos_token_id": 1,
        "eos_token_id": 2, "initializer_range": 0.02, "use_cache": True, "torch_dtype": "float32",
        "attention_dropout": 0.0, "tie_word_embeddings": False}
EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": False, "router_aux_loss_coef": 0.01}
FACTORS = {"embedding_multiplier": 3.0, "attention_multiplier": 0.3, "residual_multiplier": 0.4,
           "logits_scaling": 1.5}
SLIDING = {"use_sliding_window": True, "sliding_window": 9}
FAMILIES = {
    "gpt2": {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 24,
             "n_positions": 64, "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new",
             "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2, "attn_pdrop": 0.0,
             "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    "gpt_neox": {**{k: v for k, v in BASE.items() if k not in ("num_key_value_heads", "rms_norm_eps")},
                 "num_attention_heads": 2, "layer_norm_eps": 1e-5, "hidden_act": "gelu",
                 "rotary_pct": 0.5, "rotary_emb_base": 500, "use_parallel_residual": True},
    "llama": {**BASE, "head_dim": 8, "rope_theta": 500.0, "attention_bias": False, "mlp_bias": False},
    "mistral": {**BASE, "head_dim": 8, "rope_theta": 500.0, "sliding_window": 11},
    "qwen2": {**BASE, "rope_theta": 500.0, **SLIDING, "max_window_layers": 1},
    "qwen3": {**BASE, "head_dim": 8, "rope_theta": 500.0, "attention_bias": False, **SLIDING,
              "max_window_layers": 1},
    "smollm3": {**BASE, "rope_theta": 500.0, **SLIDING, "no_rope_layers": [1, 0],
                "no_rope_layer_interval": 2, "attention_bias": False, "mlp_bias": False},
    "phi3": {**BASE, "num_attention_heads": 2, "rope_theta": 500.0, "sliding_window": 21,
             "partial_rotary_factor": 0.5, "original_max_position_embeddings": 32,
             "rope_scaling": None, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "olmo2": {**BASE, "rope_theta": 500.0, "attention_bias": False},
    "gemma3_text": {**{k: v for k, v in BASE.items() if k != "hidden_act"}, "head_dim": 8,
                    "num_hidden_layers": 3, "hidden_activation": "gelu_pytorch_tanh",
                    "rope_theta": 500.0, "rope_local_base_freq": 50.0, "sliding_window": 9,
                    "sliding_window_pattern": 2, "query_pre_attn_scalar": 24,
                    "attention_bias": False, "tie_word_embeddings": True},
    "mixtral": {**BASE, **EXPERTS, "head_dim": 8, "rope_theta": 500.0, "sliding_window": 11,
                "num_local_experts": 4},
    "qwen2_moe": {**BASE, **EXPERTS, "rope_theta": 500.0, **SLIDING, "max_window_layers": 1,
                  "num_experts": 4, "moe_intermediate_size": 16, "qkv_bias": True,
                  "shared_expert_intermediate_size": 20, "norm_topk_prob": True,
                  "decoder_sparse_step": 1, "mlp_only_layers": []},
    "qwen3_moe": {**BASE, **EXPERTS, "head_dim": 8, "rope_theta": 500.0, **SLIDING,
                  "num_experts": 4, "moe_intermediate_size": 16, "norm_topk_prob": True,
                  "decoder_sparse_step": 1, "mlp_only_layers": [], "attention_bias": False},
    "olmoe": {**BASE, **EXPERTS, "rope_theta": 500.0, "num_experts": 4, "norm_topk_prob": True,
              "attention_bias": False, "clip_qkv": None},
    "gpt_oss": {**BASE, **EXPERTS, "head_dim": 8, "rope_theta": 500.0, "sliding_window": 9,
                "num_local_experts": 4, "attention_bias": True, "swiglu_limit": 0.9,
                "layer_types": ["sliding_attention", "full_attention"]},
    "seed_oss": {**BASE, "head_dim": 8, "rope_theta": 500.0, "attention_bias": True,
                 "attention_out_bias": False, "mlp_bias": False, "residual_dropout": 0.0},
    "hunyuan_v1_dense": {**BASE, "head_dim": 8, "rope_theta": 500.0, "attention_bias": False},
    "ernie4_5": {**BASE, "head_dim": 8, "rope_theta": 500.0, "use_bias": False},
    "ernie4_5_moe": {**BASE, "rope_theta": 500.0, "use_bias": False, "moe_num_experts": 4, "moe_k": 2,
                     "moe_num_shared_experts": 1, "moe_intermediate_size": 16,
                     "moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1,
                     "moe_norm_min": 1e-12, "output_router_logits": False,
                     "router_aux_loss_coef": 0.01},
    "granite_swa": {**BASE, **FACTORS, "rope_theta": 500.0, "attention_bias": False,
                    "mlp_bias": False, "sliding_window": 9, "layer_rope_theta": [0, 50.0],
                    "layer_types": ["full_attention", "sliding_attention"]},
    "granitemoe_swa": {**BASE, **EXPERTS, **FACTORS, "rope_theta": 500.0, "attention_bias": False,
                       "num_local_experts": 4, "shared_intermediate_size": 12, "sliding_window": 9,
                       "layer_types": ["full_attention", "sliding_attention"]},
    "granitemoehybrid": {**BASE, **FACTORS, "rope_theta": 500.0, "attention_bias": False,
                         "num_local_experts": 0, "shared_intermediate_size": 40,
                         "position_embedding_type": "rope", "layer_types": ["full_attention"] * 2,
                         "mamba_n_heads": 8, "mamba_d_head": 8},
    "cohere2": {**{k: v for k, v in BASE.items() if k != "rms_norm_eps"}, "layer_norm_eps": 1e-5,
                "rope_theta": 500.0, "attention_bias": False, "logit_scale": 0.5,
                "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]},
    "olmo_hybrid": {**BASE, "rope_theta": 500.0, "attention_bias": False,
                    "layer_types": ["linear_attention", "full_attention"],
                    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
                    "linear_key_head_dim": 6, "linear_value_head_dim": 10,
                    "linear_conv_kernel_dim": 4, "linear_allow_neg_eigval": True},
    "exaone4": {**BASE, "head_dim": 8, "rope_theta": 500.0, "sliding_window": 9,
                "sliding_window_pattern": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "mellum": {**BASE, **EXPERTS, "head_dim": 8, "sliding_window": 9, "num_experts": 4,
               "layer_types": ["sliding_attention", "full_attention"], "norm_topk_prob": True,
               "moe_intermediate_size": 16, "attention_bias": False,
               "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 500.0},
                                   "sliding_attention": {"rope_type": "default", "rope_theta": 50.0}}},
    "solar_open": {**{k: v for k, v in BASE.items() if k != "intermediate_size"}, "head_dim": 8,
                   "rope_theta": 500.0, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
                   "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1,
                   "routed_scaling_factor": 1.5, "norm_topk_prob": True, "attention_bias": False},
    "afmoe": {**BASE, "head_dim": 8, "rope_theta": 500.0, "num_experts": 4, "num_shared_experts": 1,
              "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_dense_layers": 1,
              "n_group": 1, "topk_group": 1, "route_scale": 1.5, "route_norm": True,
              "score_func": "sigmoid", "mup_enabled": True, "sliding_window": 9,
              "layer_types": ["sliding_attention", "full_attention"], "attention_bias": False},
    "cohere2_moe": {**{k: v for k, v in BASE.items() if k != "rms_norm_eps"}, "layer_norm_eps": 1e-5,
                    "head_dim": 8, "rope_theta": 500.0, "attention_bias": False, "logit_scale": 0.5,
                    "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"],
                    "num_experts": 4, "num_experts_per_tok": 2, "num_shared_experts": 1,
                    "first_k_dense_replace": 1, "norm_topk_prob": True},
    "hy_v3": {**BASE, "head_dim": 8, "rope_theta": 500.0, "num_experts": 4, "num_shared_experts": 1,
              "num_experts_per_tok": 2, "moe_intermediate_size": 16, "router_scaling_factor": 1.5,
              "mlp_layer_types": ["dense", "sparse"], "attention_bias": False},
}
REMOVED = "\0removed"
SIZES = {"vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "n_embd", "n_layer",
         "n_head"}
# Values to set besides null, those of the other type of number, and the class's default.
VALUES = {
    "num_key_value_heads": [1, 4, 8], "head_dim": [4, 16], "intermediate_size": [40], "n_inner": [40],
    "moe_intermediate_size": [24], "shared_expert_intermediate_size": [12],
    "max_position_embeddings": [32, 48, 128], "n_positions": [48, 128], "n_ctx": [32],
    "rms_norm_eps": [0.01, 1], "layer_norm_eps": [0.01], "layer_norm_epsilon": [0.01],
    "hidden_act": ["gelu", "swish", "gelu_pytorch_tanh", "relu", "gelu_new", "gelu_fast"],
    "hidden_activation": ["silu", "gelu", "gelu_new", "gelu_fast"],
    "activation_function": ["gelu", "gelu_pytorch_tanh", "gelu_fast", "relu"],
    "rope_theta": [50.0, 7, "500"], "rotary_emb_base": [50, 7.5], "rotary_pct": [0.25, 1.0, 1],
    "partial_rotary_factor": [0.25, 1.0], "rope_local_base_freq": [500.0],
    "sliding_window": [0, 1, 5, 4096], "max_window_layers": [0, 2, 28],
    "sliding_window_pattern": [1, 3], "_sliding_window_pattern": [1, 3],
    "layer_types": [["full_attention"] * 2, ["sliding_attention", "full_attention"],
                    ["full_attention", "sliding_attention"], ["full_attention"]],
    "no_rope_layers": [[0, 1], [1, 1], [0, 0]], "no_rope_layer_interval": [1, 3],
    "num_local_experts": [3, 4], "num_experts": [3, 4], "num_experts_per_tok": [1, 3],
    "experts_per_token": [1, 3], "router_aux_loss_coef": [0.5], "router_jitter_noise": [0.1],
    "mlp_only_layers": [[0], [1]], "decoder_sparse_step": [2], "query_pre_attn_scalar": [8, 8.0],
    "n_routed_experts": [2, 8], "n_shared_experts": [2], "n_group": [2], "topk_group": [2],
    "routed_scaling_factor": [0.5], "num_shared_experts": [2], "router_scaling_factor": [0.5],
    "moe_num_experts": [3], "moe_k": [1], "moe_num_shared_experts": [0, 2], "moe_layer_interval": [2],
    "moe_layer_start_index": [0, 2], "moe_layer_end_index": [0, 1], "moe_norm_min": [0.9],
    "layer_rope_theta": [[50.0, 5.0], [0, 0], [5.0]], "shared_intermediate_size": [0, 16],
    "position_embedding_type": ["nope", "rope"], "logit_scale": [2.0], "embedding_multiplier": [1.0],
    "residual_multiplier": [1.0], "attention_multiplier": [1], "logits_scaling": [4],
    "linear_num_key_heads": [1, 4], "linear_num_value_heads": [2], "linear_key_head_dim": [4],
    "linear_value_head_dim": [4], "linear_conv_kernel_dim": [2],
    "mlp_layer_types": [["dense"] * 2, ["sparse"] * 2, ["dense"]],
    "swiglu_limit": [3.0], "swiglu_alpha": [1.0], "clip_qkv": [0.3, 8.0],
    "attn_logit_softcapping": [5.0], "final_logit_softcapping": [5.0],
    "original_max_position_embeddings": [16, 32], "pretraining_tp": [2],
    "initial_context_length": [16], "initializer_range": [0.1], "chunk_size_feed_forward": [4],
    # Keys of no class
    "auto_map": [{"AutoModelForCausalLM": "modeling.Model"}], "transformers.js_config": [{"a": 1}],
    "_attn_implementation_autoset": [True, False], "use_mrope": [False, True],
    "is_llama_config": [True], "rope_interleaved": [False, True], "interpolate_factor": [1],
    "full_attn_mod": [1], "lm_head_bias": [False, True], "is_causal": [True, False],
    "quantization_config": [{}], "unheard_of": [False, 3], "loss_type": ["ForCausalLM"],
    "temperature": [0.5], "num_labels": [3], "gradient_checkpointing": [True],
    "is_decoder": [True], "is_encoder_decoder": [True], "add_cross_attention": [True],
    "tie_encoder_decoder": [True], "per_layer_config": [{}], "rope_parameters": [{}],
    "rope_scaling": [{}], "n_head": [2], "n_embd": [16], "n_layer": [1],
}
ROPE = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "rotary_pct",
        "rotary_emb_base", "rope_local_base_freq", "original_max_position_embeddings",
        "max_position_embeddings")
WINDOWS = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types",
           "sliding_window_pattern", "_sliding_window_pattern", "no_rope_layers",
           "no_rope_layer_interval", "use_bidirectional_attention")
HEADS = ("num_key_value_heads", "head_dim", "attention_bias", "qkv_bias", "tie_word_embeddings")
MIXING = ("num_local_experts", "num_experts", "num_experts_per_tok", "experts_per_token",
          "norm_topk_prob", "mlp_only_layers", "decoder_sparse_step", "moe_intermediate_size")


def scalings(pairs):
    """Objects for rope_scaling and rope_parameters. `pairs`: rotated pairs of values of a head."""
    llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    factors = {"short_factor": [1.0 + 0.1 * i for i in range(pairs)],
               "long_factor": [1.5 + i for i in range(pairs)]}
    original = {"original_max_position_embeddings": 16}
    return [{"rope_type": "default"}, {"type": "default"}, {"rope_theta": 50.0},
            {"rope_type": "default", "rope_theta": 50.0}, {"rope_type": "linear", "factor": 4.0},
            {"type": "linear", "factor": 4.0}, {"rope_type": "linear", "type": "dynamic", "factor": 4.0},
            {"rope_type": "linear", "factor": 4.0, "rope_theta": 50.0},
            {"rope_type": "linear", "factor": 4.0, **original},
            {"rope_type": "dynamic", "factor": 2.0}, {"rope_type": "dynamic", "factor": 2.0, **original},
            {"rope_type": "llama3", **llama3}, {"rope_type": "llama3", **llama3, **original},
            {"rope_type": "yarn", "factor": 4.0}, {"rope_type": "yarn", "factor": 4.0, **original},
            {"rope_type": "yarn", "factor": None, **original}, {"rope_type": "yarn", **original},
            {"type": "yarn", "factor": 4.0, **original, "beta_fast": 0, "mscale": 0.0,
             "mscale_all_dim": 0.7, "attention_factor": None, "truncate": False},
            {"rope_type": "yarn", "factor": 4.0, **original, "attention_factor": 1.3},
            {"rope_type": "yarn", "factor": 4.0, **original, "mscale": 1.0, "mscale_all_dim": 0.7},
            {"rope_type": "longrope", **factors}, {"rope_type": "longrope", **factors, **original},
            {"type": "su", **factors, **original}, {"type": "longrope", **factors, "factor": 3.0},
            {"rope_type": "longrope", **factors, "attention_factor": 1.3, **original},
            {"rope_type": "default", "partial_rotary_factor": 0.25},
            {"rope_type": "linear", "factor": 4.0, "partial_rotary_factor": 0.25},
            {"rope_type": "default", "factor": 4.0}, {"rope_type": "none"}, {"rope_type": None},
            {"rope_type": "default", "rope_theta": None}, {"finetuned": True},
            {"full_attention": {"rope_type": "default", "rope_theta": 50.0}},
            {"full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 50.0},
             "sliding_attention": {"rope_type": "default", "rope_theta": 5.0}},
            {"full_attention": {"rope_type": "yarn", "factor": 4.0, **original, "truncate": False}},
            {"full_attention": {"type": "linear", "factor": 4.0}, "sliding_attention": None},
            {"sliding_attention": {"rope_type": "linear", "factor": 4.0}}]


def class_fields(kind):
    config_class = type(transformers.AutoConfig.for_model(kind))
    common = {field.name for field in dataclasses.fields(transformers.PreTrainedConfig)}
    return {field.name: field.default for field in dataclasses.fields(config_class)
            if field.name not in common and isinstance(
                field.default, (int, float, str, bool, list, type(None)))}


def single_changes(kind, base, all_keys):
    """Patches of one key each."""
    own = class_fields(kind)
    patches = [{key: REMOVED} for key in base]
    for key in sorted(all_keys | set(VALUES) | set(base)):
        values = list(VALUES.get(key, []))
        default = own.get(key, REMOVED)
        if key in own and key not in SIZES:
            values += [default] + ([not default] if isinstance(default, bool) else [])
        elif key not in own and key in all_keys and not VALUES.get(key):
            values += [True, False]
        if key == "layer_types" and kind == "gemma3_text":
            values = [list(v) + ["full_attention"] for v in values if v]
        if key == "model_type":
            continue
        values.append(None)
        seen = []
        for value in values:
            text = json.dumps(value)
            if text not in seen and not (key in base and json.dumps(base[key]) == text):
                seen.append(text)
                patches.append({key: value})
    rotary = {"phi3": 4, "gpt_neox": 4}.get(kind, base.get("head_dim", 4) // 2)
    if kind != "gpt2":
        for scaling in scalings(rotary):
            patches += [{"rope_scaling": scaling}, {"rope_parameters": scaling},
                        {"rope_parameters": scaling, "rope_theta": REMOVED}]
    return patches


def interacting_pairs(kind, base, singles, count, seed):
    """Pairs of single changes of keys that interact, and others; `count` of each group at most."""
    rng = random.Random(seed)
    groups = [[p for p in singles if set(p) <= set(group)] for group in (ROPE, WINDOWS, HEADS, MIXING)]
    groups.append([p for p in singles if not set(p) & SIZES])
    patches = []
    for group in groups:
        pairs = [{**a, **b} for a, b in itertools.combinations(group, 2) if not set(a) & set(b)]
        patches += rng.sample(pairs, min(count, len(pairs)))
    return patches


def values_of(name, shape, centre):
    digest = hashlib.sha256(f"{name} {list(shape)}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    values = torch.randn(shape, generator=generator)
    if len(shape) >= 2:
        return 0.3 * values
    return 0.2 * values if name.endswith("bias") or name.endswith("sinks") else centre + 0.2 * values


def their_loss(config, folder, tokens):
    """Transformers' loss. Writes the weights into `folder`. The folder is its config.json."""
    loaded = transformers.AutoConfig.from_pretrained(folder)
    loaded._attn_implementation = "eager"
    loaded._experts_implementation = "eager"
    if getattr(loaded, "pad_token_id", None) is not None and loaded.pad_token_id >= VOCAB:
        loaded.pad_token_id = None
    with torch.device("meta"):
        size = sum(p.numel() for p in
                   transformers.AutoModelForCausalLM.from_config(loaded).parameters())
    if size > 30e6:
        raise OverflowError("too large for this script")
    model = transformers.AutoModelForCausalLM.from_config(loaded).to(torch.float32).eval()
    centre = 0.0 if "gemma" in config["model_type"] else 1.0
    for name, parameter in model.named_parameters():
        parameter.data.copy_(values_of(name, parameter.shape, centre))
    model.tie_weights()
    saved = {name: value.contiguous() for name, value in weights(model).items()}
    safetensors.torch.save_file(saved, folder / "model.safetensors")
    with torch.no_grad():
        logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1]
    loss = torch.nn.functional.cross_entropy(logits.double(), tokens[1:]).item()
    if not math.isfinite(loss):
        raise ArithmeticError("the loss is not finite")
    shapes = sorted((name, list(value.shape)) for name, value in saved.items())
    return loss, hashlib.sha256(json.dumps(shapes).encode()).hexdigest()


class Ballast:
    def __init__(self, program, folder, data):
        self.program, self.folder, self.losses = program, folder, {}
        self.data = data
        self.config = folder.parent / "run.json"
        self.config.write_text(json.dumps({
            "model": {"path": str(folder)}, "train_batch_size": 1,
            "data": {"documents": [str(data)], "sequence_length": T}}))

    def run(self, *arguments):
        return subprocess.run([self.program, *map(str, arguments)], capture_output=True, text=True,
                              check=False, timeout=120)

    def section(self):
        """The keys of model, or the message of a refusal."""
        done = self.run("train", self.config, "--print-config")
        if done.returncode == 0:
            section = json.loads(done.stdout)["model"]
            own = ("weights", "router_bias_update_speed", "pad_token_id")  # these change no loss
            return {k: v for k, v in section.items() if k not in own}, None
        assert done.returncode in (1, 2) and done.stderr.count("\n") == 1, done
        return None, done.stderr

    def loss(self, section, shapes):
        key = (json.dumps(section), shapes)
        if key not in self.losses:
            done = self.run("eval", self.folder, "--data", self.data, "--sequence-length", T, "--set",
                            "bf16.enabled=false", "--json")
            if done.returncode == 0:
                self.losses[key] = json.loads(done.stdout)["loss"], None
            else:
                assert done.returncode in (1, 2), done
                self.losses[key] = None, done.stderr
        return self.losses[key]


def changed_names(patch):
    names = set(patch)
    for value in patch.values():
        if isinstance(value, dict):
            names |= set(value)
    if names & set(ROPE):
        names |= {"rope_scaling", "rope_theta", "rope_parameters"}
    return names


def name_in(message, patch):
    """The name of a changed key that the message has."""
    found = [name for name in sorted(changed_names(patch), key=len, reverse=True) if name in message]
    own = {"num_key_value_heads": "num_kv_heads", "rms_norm_eps": "norm_epsilon",
           "num_hidden_layers": "num_layers", "num_attention_heads": "num_heads",
           "tie_word_embeddings": "tie_embeddings", "n_positions": "max_sequence",
           "max_position_embeddings": "max_sequence", "layer_norm_eps": "norm_epsilon",
           "layer_norm_epsilon": "norm_epsilon", "n_inner": "intermediate_size"}
    found += [own[name] for name in patch if name in own and own[name] in message]
    return found[0] if found else None


def apply(base, patch):
    config = copy.deepcopy(base)
    for key, value in patch.items():
        if value is REMOVED:
            config.pop(key, None)
        else:
            config[key] = copy.deepcopy(value)
    return config


def difference(section, base):
    return {key: value for key, value in section.items() if base.get(key, REMOVED) != value}


class Comparison:
    """The cases of one family."""

    def __init__(self, program, kind, path):
        self.base = {"model_type": kind, **FAMILIES[kind]}
        self.folder = path / "model"
        self.folder.mkdir(exist_ok=True)
        self.tokens = torch.randint(0, VOCAB, (T,), generator=torch.Generator().manual_seed(5))
        data = path / "data.safetensors"
        safetensors.torch.save_file(
            {"tokens": self.tokens.to(torch.uint16), "documents": torch.tensor([0, T])}, data,
            metadata={"format": "ballast documents", "version": "1"})
        self.ballast = Ballast(program, self.folder, data)
        self.counts = collections.Counter()
        self.differences = []
        result, section = self.compare({})
        assert result == "equal", (kind, result, section, self.differences)
        self.section = section

    def compare(self, patch):
        """The outcome, and the model section or the named key."""
        config = apply(self.base, patch)
        (self.folder / "config.json").write_text(json.dumps(config))
        section, message = self.ballast.section()
        (self.folder / "model.safetensors").unlink(missing_ok=True)
        theirs, reason, shapes = None, "", ""
        try:
            theirs, shapes = their_loss(config, self.folder, self.tokens)
        except Exception as error:  # of any kind
            reason = f"{type(error).__name__}: {error}".replace("\n", " ")[:100]
        if section is not None and theirs is not None:
            loss, message = self.ballast.loss(section, shapes)
            if loss is not None:
                equal = abs(loss - theirs) < TOLERANCE
                if not equal:
                    self.differences.append((patch, theirs, loss))
                return ("equal" if equal else "different"), section
        if message is None:
            return "only transformers refuses: " + reason.split(":")[0], section
        name = name_in(message, patch)
        if name is None and theirs is not None:
            self.differences.append((patch, theirs, message))
            return "refused without a name", message
        return ("both refuse" if theirs is None else "refused by name"), name


    def write(self, line, patch, result, found):
        """Adds a result to the line of the family."""
        changes = {"-" + k if v is REMOVED else k: 0 if v is REMOVED else v for k, v in patch.items()}
        [(key, value), *others] = changes.items()
        if result == "equal":
            changed = difference(found, self.section)
            if changed or others:
                line["equal"].append([changes, changed])
            else:
                line["without_effect"].setdefault(key, []).append(value)
        elif result == "refused by name" and not others and found in key:
            line["refused"].setdefault(key, []).append(value)
        elif result in ("refused by name", "both refuse"):
            line["refused_with"].append([changes, found])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("ballast")
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--only", nargs="*", default=list(FAMILIES))
    parser.add_argument("--out", default=pathlib.Path(__file__).parent / "folder_configs.jsonl")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    torch.set_num_threads(1)
    all_keys = set().union(*(class_fields(kind) for kind in FAMILIES)) - SIZES
    lines = []
    for kind in arguments.only:
        with tempfile.TemporaryDirectory() as path:
            run = Comparison(arguments.ballast, kind, pathlib.Path(path))
            line = {"family": kind, "config": run.base, "model": run.section, "without_effect": {},
                    "refused": {}, "equal": [], "refused_with": []}
            singles = single_changes(kind, run.base, all_keys)
            pairs = interacting_pairs(kind, run.base, singles, arguments.pairs, kind)
            keys = {key for patch in singles for key in patch}
            for patch in singles + pairs:
                result, found = run.compare(patch)
                run.counts[result] += 1
                run.write(line, patch, result, found)
            line["counts"] = {"keys": len(keys), "single": len(singles), "pairs": len(pairs),
                              **dict(sorted(run.counts.items()))}
            lines.append(line)
            print(kind, line["counts"], flush=True)
            for patch, theirs, ours in run.differences:
                print("  ", {k: "-" if v is REMOVED else v for k, v in patch.items()}, theirs, ours,
                      flush=True)
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    pathlib.Path(arguments.out).write_text(text)


if __name__ == "__main__":
    main()
