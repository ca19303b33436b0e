# Shapes of models and placements, as options of `ballast bench step`. Sourced by tools/gpu_check.sh.
llama_1_5b=(--family llama --vocab 32000 --hidden 2048 --layers 24 --heads 16 --kv-heads 4
  --intermediate 7680 --sequence 2048)
llama_8b=(--family llama --vocab 128256 --hidden 4096 --heads 32 --kv-heads 8 --intermediate 14336)
# A quarter of the vocabulary and few layers, so that making the weights takes few seconds.
adapters='ballast.adapters={"targets": "all-linear", "rank": 16, "alpha": 16}'
lora=(--set ballast.train=adapters --set "$adapters")
# Qwen3.5-27B: three of four layers are gated delta nets.
qwen3_5=(--family qwen3_5 --vocab 32768 --hidden 5120 --heads 24 --kv-heads 4 --intermediate 17408
  --set model.head_dim=256 --set model.linear_num_key_heads=16 --set model.linear_num_value_heads=48
  --set model.linear_key_head_dim=128 --set model.linear_value_head_dim=128 "${lora[@]}")
# GLM-4.7-Flash: latent attention, experts, one dense layer.
glm_flash=(--family glm4_moe_lite --vocab 32768 --hidden 2048 --heads 20 --kv-heads 20
  --intermediate 10240 --set model.q_lora_rank=768 --set model.kv_lora_rank=512
  --set model.qk_nope_head_dim=192 --set model.qk_rope_head_dim=64 --set model.v_head_dim=256
  --set model.n_routed_experts=64 --set model.num_experts_per_tok=4 --set model.moe_intermediate_size=1536)
# Gemma 4: five of six layers have a window and heads of 256, the sixth has heads of 512.
gemma4=(--family gemma4 --vocab 32768 --hidden 5376 --heads 32 --kv-heads 16 --intermediate 21504
  --set model.head_dim=256 --set model.global_head_dim=512 --set model.num_global_key_value_heads=4
  --set model.attention_k_eq_v=true --set model.sliding_window=1024 "${lora[@]}")

states_on_host=(--set zero_optimization.stage=3 --set zero_optimization.offload_optimizer.device=cpu)
all_on_host=("${states_on_host[@]}" --set zero_optimization.offload_param.device=cpu)

# Writes a folder with the config.json of the 8B model, for programs that read such folders.
write_llama_8b() { # FOLDER LAYERS
  mkdir -p "$1" && cat >"$1/config.json" <<J
{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
 "intermediate_size": 14336, "num_hidden_layers": $2, "num_attention_heads": 32, "num_key_value_heads": 8,
 "hidden_act": "silu", "max_position_embeddings": 8192, "rms_norm_eps": 1e-05, "rope_theta": 500000.0,
 "initializer_range": 0.02, "tie_word_embeddings": false}
J
}
