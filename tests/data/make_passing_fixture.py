#!/usr/bin/env python3
"""Writes small models of text and images, and the loss that transformers computes for text.

    python tests/data/make_passing_fixture.py [OUTPUT_FOLDER]

Needs torch, transformers and safetensors; the build and the tests do not. It writes these files
to OUTPUT_FOLDER, or to passing/ in the folder of this script:

    gemma3/        one file; "language_model.model." before the names of the text model, tied
    qwen3_vl/      two files; "model.language_model.", and layers for multi-token prediction, some
                   of them in types that are not trained
    glm_moe_dsa/   indexers of sparse attention
    mistral3/      Mistral Small 4: stacked experts
    kimi_k25/      the text model is DeepSeek-V3
    qwen3_5_moe/   stacked experts of a class that is also saved with a tensor per expert; gated delta
                   nets, and a layer for multi-token prediction with stacked experts
    gemma4/        Gemma 4 E2B in small, with keys and values that no layer reads, as published
    gemma4_experts/ layers with experts in addition to an MLP; the two layers have different heads
    qwen2_5_vl/    the text model's keys are outside text_config, as in folders before transformers 5
    tokens.u16     tokens of one sequence
    losses.json    cross-entropy of its tokens after the first, in fp32, by folder
"""

import json
import pathlib
import sys

import safetensors.torch
import torch
import transformers

LENGTH, VOCABULARY = 32, 61
TEXT = {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "vocab_size": VOCABULARY, "max_position_embeddings": 64,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
AXES = {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [2, 3, 3]}
TOWER = {"hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2, "patch_size": 4,
         "out_hidden_size": TEXT["hidden_size"]}


def gemma3():
    text = {**TEXT, "head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 20,
            "layer_types": ["sliding_attention", "full_attention"]}
    tower = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
             "num_attention_heads": 2, "image_size": 16, "patch_size": 8}
    config = transformers.Gemma3Config(text_config=text, vision_config=tower, mm_tokens_per_image=4)
    return transformers.Gemma3ForConditionalGeneration(config)


def qwen3_vl():
    config = transformers.Qwen3VLConfig(
        text_config={**TEXT, "head_dim": 16, "rope_parameters": AXES},
        vision_config={**TOWER, "deepstack_visual_indexes": [0], "num_position_embeddings": 16})
    return transformers.Qwen3VLForConditionalGeneration(config)


def qwen2_5_vl():
    config = transformers.Qwen2_5_VLConfig(text_config={**TEXT, "rope_parameters": AXES},
                                           vision_config=TOWER)
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


LATENT = {"hidden_size": 32, "intermediate_size": 24, "moe_intermediate_size": 8,
          "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
          "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
          "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
          "qk_rope_head_dim": 8, "v_head_dim": 8, "vocab_size": VOCABULARY,
          "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None,
          "pad_token_id": None, "tie_word_embeddings": False}


def glm_moe_dsa():
    config = transformers.GlmMoeDsaConfig(
        **LATENT, index_topk=32, index_head_dim=8, index_n_heads=2,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0})
    return transformers.GlmMoeDsaForCausalLM(config)


def mistral3():
    text = {**LATENT, "model_type": "mistral4", "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "beta_fast": 32.0,
        "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
        "original_max_position_embeddings": 16}}
    tower = {"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16, "head_dim": 8,
             "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16, "patch_size": 8}
    config = transformers.Mistral3Config(text_config=text, vision_config=tower,
                                         tie_word_embeddings=False)
    return transformers.Mistral3ForConditionalGeneration(config)


def kimi_k25():
    text = {**LATENT, "model_type": "deepseek_v3",
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}}
    tower = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "patch_size": 4,
             "num_attention_heads": 2, "pos_emb_height": 4, "pos_emb_width": 4}
    config = transformers.Kimi_K25Config(text_config=text, vision_config=tower,
                                         projection_hidden_size=64, tie_word_embeddings=False)
    return transformers.Kimi_K25ForConditionalGeneration(config)


def qwen3_5_moe():
    text = {**TEXT, "head_dim": 16, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 12,
            "num_experts": 3, "num_experts_per_tok": 2, "linear_num_key_heads": 1,
            "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
            "layer_types": ["linear_attention", "full_attention"],
            "rope_parameters": {**AXES, "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0]}}
    text.pop("intermediate_size")
    config = transformers.Qwen3_5MoeConfig(
        text_config=text, vision_config={**TOWER, "num_position_embeddings": 16},
        tie_word_embeddings=False)
    return transformers.Qwen3_5MoeForConditionalGeneration(config)


def gemma4_of(text):
    tower = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8,
             "num_attention_heads": 2, "num_key_value_heads": 2, "patch_size": 4,
             "position_embedding_size": 16}
    config = transformers.Gemma4Config(text_config=text, vision_config=tower, audio_config=None)
    return transformers.Gemma4ForConditionalGeneration(config)


def gemma4_experts():
    text = {**TEXT, "pad_token_id": 0, "head_dim": 8, "global_head_dim": 16, "sliding_window": 8,
            "num_global_key_value_heads": 1, "attention_k_eq_v": True, "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": VOCABULARY,
            "layer_types": ["sliding_attention", "full_attention"], "enable_moe_block": True,
            "num_experts": 3, "top_k_experts": 2, "moe_intermediate_size": 8,
            "final_logit_softcapping": 5.0}
    return gemma4_of(text)


def add_stacked_prediction_layer(folder):
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    tensors["mtp.layers.0.mlp.experts.gate_up_proj"] = torch.randn(3, 16, 32).to(torch.bfloat16)
    tensors["mtp.layers.0.mlp.experts.down_proj"] = torch.randn(3, 32, 8).to(torch.bfloat16)
    safetensors.torch.save_file(tensors, path, {"format": "pt"})


def gemma4():
    text = {**TEXT, "num_hidden_layers": 3, "head_dim": 16, "global_head_dim": 24, "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "num_kv_shared_layers": 1, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCABULARY, "final_logit_softcapping": 30.0,
            "pad_token_id": 0}
    return gemma4_of(text)


def add_unread_keys(folder):
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    attention = "model.language_model.layers.2.self_attn."
    for name in ("k_proj", "v_proj", "k_norm"):
        given = tensors[f"model.language_model.layers.1.self_attn.{name}.weight"]
        tensors[f"{attention}{name}.weight"] = torch.randn(given.shape).to(given.dtype)
    safetensors.torch.save_file(tensors, path, {"format": "pt"})


def loss_of(folder, tokens):
    kind = json.loads((folder / "config.json").read_text())["model_type"]
    make = (transformers.AutoModelForCausalLM if kind == "glm_moe_dsa" else
            transformers.AutoModelForImageTextToText)
    model = make.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(input_ids=tokens[None]).logits[0]
    return torch.nn.functional.cross_entropy(logits[:-1].double(), tokens[1:]).item()


def add_prediction_layers(tensors):
    tensors["mtp.fc.weight"] = torch.randn(6, 5).to(torch.bfloat16)
    tensors["mtp.layers.0.mlp.down_proj.weight"] = torch.randn(7, 3).to(torch.float8_e4m3fn)
    tensors["mtp.layers.0.steps"] = torch.tensor([-3, 2**40])
    tensors["mtp.norm.weight"] = torch.randn(3)


def split(folder):
    """Divides model.safetensors into two files with an index."""
    whole = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(whole)
    add_prediction_layers(tensors)
    whole.unlink()
    names = list(tensors)
    weight_map = {}
    for i in range(2):
        file = f"model-{i + 1:05}-of-00002.safetensors"
        part = {name: tensors[name] for name in names[i::2]}
        safetensors.torch.save_file(part, folder / file, {"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


def name_as_published(folder):
    """transformers renames layers of the text model to blocks when it saves Kimi K2.5."""
    path = folder / "model.safetensors"
    tensors = {name.replace("language_model.model.blocks.", "language_model.model.layers."): tensor
               for name, tensor in safetensors.torch.load_file(path).items()}
    safetensors.torch.save_file(tensors, path, {"format": "pt"})
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["model_type"] = "kimi_k2"
    path.write_text(json.dumps(config, indent=1) + "\n")


def flatten(folder):
    """Moves the keys of the text model out of text_config."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    text = config.pop("text_config")
    parameters = text.pop("rope_parameters")
    text["rope_theta"] = parameters["rope_theta"]
    text["rope_scaling"] = {"type": "mrope", "mrope_section": parameters["mrope_section"]}
    path.write_text(json.dumps({**text, **config}, indent=1) + "\n")


def make_folder(make, out, tokens):
    """Returns the loss."""
    folder = out / make.__name__
    model = make().to(torch.bfloat16)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.data = torch.randn(buffer.shape) * 0.1
    # transformers saves stacked experts if it has loaded them.
    model.save_pretrained(folder, save_original_format=make is not qwen3_5_moe)
    (folder / "generation_config.json").unlink(missing_ok=True)
    if make is kimi_k25:
        name_as_published(folder)
    if make is gemma4:
        add_unread_keys(folder)
    return loss_of(folder, tokens)


def main():
    torch.manual_seed(5)
    here = pathlib.Path(__file__).resolve().parent
    out = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else here / "passing"
    tokens = torch.randint(0, VOCABULARY, (LENGTH + 1,))
    losses = {make.__name__: make_folder(make, out, tokens)
              for make in (gemma3, qwen3_vl, qwen2_5_vl, glm_moe_dsa, mistral3, kimi_k25)}
    split(out / "qwen3_vl")
    flatten(out / "qwen2_5_vl")
    losses["qwen3_5_moe"] = make_folder(qwen3_5_moe, out, tokens)
    add_stacked_prediction_layer(out / "qwen3_5_moe")
    losses["gemma4_experts"] = make_folder(gemma4_experts, out, tokens)
    torch.manual_seed(6)
    losses["gemma4"] = make_folder(gemma4, out, tokens)
    (out / "qwen3_vl/preprocessor_config.json").write_text('{"size":  16}\n')
    (out / "qwen3_vl/video_preprocessor_config.json").write_text('{"fps":  2}\n')
    (out / "gemma3/processor_config.json").write_text('{"image_seq_length":  4}\n')
    (out / "tokens.u16").write_bytes(tokens.to(torch.uint16).numpy().tobytes())
    (out / "losses.json").write_text(json.dumps(losses, indent=1) + "\n")


if __name__ == "__main__":
    main()
