// A key of the config has an effect, or a message names it.

#include <algorithm>
#include <cstdlib>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "ballast/config/key_effects.h"
#include "ballast/model/family.h"

#include "src/model/description/layer_rules.h"
#include "tests/support/fuzz_inputs.h"
#include "tests/unit/config/samples.h"

namespace ballast::config::unused_keys_test {
namespace {

using nlohmann::json;
using test::kMinimal;
using test::parse_text;

constexpr std::size_t kLayers = 6;

json repeated(std::initializer_list<json> members) {
  json list = json::array();
  for (std::size_t i = 0; i < kLayers; ++i) list.push_back(*(members.begin() + i % members.size()));
  return list;
}

/// Plausible values of the keys that only some families have, besides those of flags.
const std::map<std::string, std::vector<json>>& plausible() {
  static const std::map<std::string, std::vector<json>> values = {
      {"rope_theta", {7777.0}},
      {"rope_scaling", {{{"rope_type", "linear"}, {"factor", 2.0}}}},
      {"rope_local_base_freq", {123.0}},
      {"query_pre_attn_scalar", {33}},
      {"embedding_multiplier", {3.0}},
      {"attention_multiplier", {0.3}},
      {"logit_scale", {0.5}},
      {"layer_rope_theta", {repeated({0, 100.0})}},
      {"position_embedding_type", {"rope"}},
      {"shared_intermediate_size", {24}},
      {"residual_multiplier", {0.4}},
      {"logits_scaling", {5.0}},
      {"attn_logit_softcapping", {20.0}},
      {"final_logit_softcapping", {20.0}},
      {"global_head_dim", {24}},
      {"num_global_key_value_heads", {2}},
      {"num_kv_shared_layers", {1, 2}},
      {"hidden_size_per_layer_input", {8}},
      {"vocab_size_per_layer_input", {300}},
      {"top_k_experts", {1}},
      {"hidden_act", {"gelu_new"}},
      {"q_lora_rank", {24}},
      {"kv_lora_rank", {24}},
      {"qk_nope_head_dim", {24}},
      {"qk_rope_head_dim", {8}},
      {"v_head_dim", {8}},
      {"partial_rotary_factor", {0.5, 0.25}},
      {"sliding_window", {16}},
      {"max_window_layers", {1, 3}},
      {"sliding_window_pattern", {2}},
      {"layer_types",
       {repeated({"full_attention"}), repeated({"sliding_attention", "full_attention"}),
        repeated({"linear_attention", "full_attention"}), repeated({"conv", "full_attention"}),
        repeated({"minimax_m3_sparse", "full_attention"})}},
      {"full_attn_idxs", {json::array({1, 3})}},
      {"layer_rope_theta", {repeated({0, 1e4}), repeated({1e4})}},
      {"qk_scale_factor", {2.0}},
      {"post_norm_eps", {1e-3}},
      {"output_multiplier", {0.5}},
      {"conv_L_cache", {4}},
      {"block_ffn_dim_multiplier", {1.5, 4.0}},
      {"block_multiple_of", {40}},
      {"full_attention_interval", {2}},
      {"linear_num_key_heads", {2}},
      {"linear_num_value_heads", {16}},
      {"linear_key_head_dim", {8}},
      {"linear_value_head_dim", {8}},
      {"linear_conv_kernel_dim", {2}},
      {"no_rope_layers", {repeated({0, 1}), repeated({1})}},
      {"no_rope_layer_interval", {2}},
      {"num_local_experts", {8}},
      {"num_experts", {8}},
      {"num_experts_per_tok", {1}},
      {"moe_intermediate_size", {24}},
      {"shared_expert_intermediate_size", {24}},
      {"n_routed_experts", {32}},
      {"n_shared_experts", {2}},
      {"num_shared_experts", {3}},
      {"moe_layer_start_index", {2}},
      {"moe_layer_end_index", {2}},
      {"moe_layer_interval", {2}},
      {"moe_norm_min", {0.5}},
      {"router_scaling_factor", {3.0}},
      {"first_k_dense_replace", {2, 6}},
      {"mlp_layer_types", {repeated({"dense"}), repeated({"sparse", "dense"})}},
      {"n_group", {2}},
      {"topk_group", {2}},
      {"routed_scaling_factor", {3.0}},
      {"index_topk", {4096}},
      {"index_topk_blocks", {8}},
      {"index_block_size", {64}},
      {"dense_intermediate_size", {40}},
      {"prefix_dense_intermediate_size", {40}},
      {"prefix_dense_sliding_window_pattern", {2}},
      {"global_attn_every_n_layers", {2}},
      {"num_dense_layers", {2}},
      {"route_scale", {3.0}},
      {"rms_norm_eps", {1e-3}},
      {"expert_selection_fn", {"sigmoid"}},
      {"shared_expert_combination_strategy", {"sum"}},
      {"swiglu_limit", {3.0}},
      {"swiglu_alpha", {1.0}},
      {"decoder_sparse_step", {2}},
      {"pad_token_id", {7}},
      {"mlp_only_layers", {json::array({0}), json::array({0, 1, 2, 3, 4, 5})}},
      {"router_aux_loss_coef", {0.5}},
      {"router_z_loss_coef", {0.1}}};
  return values;
}

/// A small model of the family.
json base_of(const std::string& family) {
  json base = {{"family", family}, {"hidden_size", 64}, {"num_layers", kLayers}, {"num_heads", 4}};
  for (const model::DetailKey& detail : model::family(family).details()) {
    if (detail.name.ends_with("_experts") && detail.standard.whole() == 0) base[detail.name] = 16;
    if (detail.name == "num_experts_per_tok") base[detail.name] = 2;
    if (detail.name == "q_lora_rank") base[detail.name] = 16;
  }
  return base;
}

Config parse_model(const json& model) {
  const json text = {{"model", model},
                     {"data", {{"text", "t"}, {"sequence_length", 32}}},
                     {"optimizer", {{"type", "SGD"}}},
                     {"train_batch_size", 1}};
  return parse_text(text.dump());
}

/// Description of a model without rotary positions.
struct Computed {
  std::vector<model::LayerSpec> layers;
  model::OuterSpec outer;
  std::vector<double> losses;
  std::string limit;

  friend bool operator==(const Computed&, const Computed&) = default;
};

Computed computed(const Config& c) {
  const model::Family& family = model::family(c.model.family);
  const model::RouterLosses losses = model::router_losses(c.model);
  return {.layers = model::layers_of(c.model),
          .outer = family.outer(c.model),
          .losses = {losses.balance, losses.z},
          .limit = family.obstacle_to_length(c.model, 1U << 20U)};
}

bool computes_alike(const Config& one, const Config& other) {
  return computed(one) == computed(other) &&
         model::rotaries_of(one.model) == model::rotaries_of(other.model);
}

bool is_noted(const Config& c, const std::string& path) {
  return std::ranges::any_of(c.notes, [&](const std::string& note) {
    const std::string keys = note.substr(0, note.find(": no effect")) + ",";
    return keys.find(path + ",") != std::string::npos;
  });
}

/// The error of the model, or "" and the config in `parsed`.
std::string error_of_model(const json& model, Config* parsed = nullptr) {
  try {
    Config c = parse_model(model);
    if (parsed != nullptr) *parsed = std::move(c);
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

/// Checks each of the keys that were added to the small model.
void check_named_or_used(const std::string& family, const json& added) {
  json model = base_of(family);
  model.update(added);
  Config all;
  if (!error_of_model(model, &all).empty()) return;  // which names a key
  for (const auto& [key, value] : added.items()) {
    json less = model;
    less.erase(key);
    if (base_of(family).contains(key)) less[key] = base_of(family)[key];
    Config without;
    if (!error_of_model(less, &without).empty()) continue;  // needed by the others
    const bool alike = computes_alike(all, without);
    const bool standard = json::parse(all.model.detail(key).compact()) ==
                          json::parse(model::default_config(family).detail(key).compact());
    const std::string described = fmt::format("{} {} without {}", family, added.dump(), key);
    if (is_noted(all, "model." + key)) {
      EXPECT_EQ(computed(all), computed(without)) << described;
    } else if (alike && !standard) {
      // The value may be the one that follows from the other keys. Then another one has an effect.
      bool used = false;
      for (const json& other : plausible().contains(key) ? plausible().at(key)
                                                         : std::vector<json>{!value.get<bool>()}) {
        json changed = model;
        changed[key] = other;
        Config with_other;
        used = used || !error_of_model(changed, &with_other).empty() ||
               !computes_alike(all, with_other);
      }
      EXPECT_TRUE(used) << described;
    }
  }
}

std::vector<std::pair<std::string, json>> values_of(const std::string& family) {
  std::vector<std::pair<std::string, json>> values;
  for (const model::DetailKey& detail : model::family(family).details()) {
    if (detail.standard.is_boolean()) {
      values.emplace_back(detail.name, !detail.standard.flag());
      continue;
    }
    for (const json& value : plausible().at(detail.name)) values.emplace_back(detail.name, value);
  }
  return values;
}

TEST(UnusedModelKeys, OfOtherFamiliesAreRefused) {
  std::map<std::string, json> all;
  for (const std::string& family : model::family_names()) {
    for (const auto& [key, value] : values_of(family)) all.emplace(key, value);
  }
  for (const std::string& family : model::family_names()) {
    const Config c = parse_model(base_of(family));
    for (const auto& [key, value] : all) {
      if (c.model.details.contains(key)) continue;
      json model = base_of(family);
      model[key] = value;
      const std::string message = error_of_model(model);
      EXPECT_EQ(message.find(fmt::format(
                    "c.json: model.{}: has no effect for the family {} (it is for ", key, family)),
                0U)
          << message;
    }
  }
  EXPECT_EQ(error_of_model({{"family", "llama"}, {"hidden_size", 64}, {"swiglu_limit", 7}}),
            "c.json: model.swiglu_limit: has no effect for the family llama (it is for gpt_oss, "
            "minimax_m3_vl_text); "
            "remove it");
}

TEST(UnusedModelKeys, AreUsedOrNoted) {
  for (const std::string& family : model::family_names()) {
    for (const auto& [key, value] : values_of(family)) check_named_or_used(family, {{key, value}});
  }
  std::mt19937 dice(static_cast<unsigned>(test::fuzz_inputs(300)));
  const std::vector<std::string> families = model::family_names();
  for (std::size_t round = 0; round < test::fuzz_inputs(300); ++round) {
    const std::string& family = families[dice() % families.size()];
    const auto values = values_of(family);
    if (values.empty()) continue;
    json added = json::object();
    for (std::size_t count = 2 + dice() % 3; count > 0; --count) {
      const auto& [key, value] = values[dice() % values.size()];
      added[key] = value;
    }
    check_named_or_used(family, added);
  }
}

TEST(UnusedModelKeys, AreNamedInOneNote) {
  const auto notes = [](const std::string& family, const json& added) {
    json model = base_of(family);
    model.update(added);
    return parse_model(model).notes;
  };
  EXPECT_EQ(notes("qwen2", {{"sliding_window", 16}, {"max_window_layers", 2}}),
            std::vector<std::string>{
                "model.sliding_window, model.max_window_layers: no effect, because other keys of "
                "this qwen2 model switch it off"});
  EXPECT_TRUE(
      notes("qwen2",
            {{"sliding_window", 16}, {"use_sliding_window", true}, {"max_window_layers", 2}})
          .empty());
  // None of the six layers has the window.
  EXPECT_EQ(notes("qwen2", {{"sliding_window", 16}, {"use_sliding_window", true}}).size(), 1U);
  EXPECT_TRUE(notes("qwen2", {{"sliding_window", nullptr}, {"max_window_layers", 28}}).empty());
  EXPECT_EQ(notes("gemma4", {{"top_k_experts", 2}, {"num_experts", 4}}).size(), 1U);
  EXPECT_EQ(notes("gemma4", {{"num_global_key_value_heads", 2}}).size(), 1U);
  EXPECT_TRUE(
      notes("gemma4", {{"num_global_key_value_heads", 2}, {"attention_k_eq_v", true}}).empty());
  EXPECT_EQ(notes("mixtral", {{"router_aux_loss_coef", 0.5}}).size(), 1U);
  EXPECT_TRUE(
      notes("mixtral", {{"router_aux_loss_coef", 0.5}, {"output_router_logits", true}}).empty());
  EXPECT_EQ(notes("smollm3", {{"rope_theta", 5.0}, {"no_rope_layers", repeated({0})}}).size(), 1U);
  // Repeating what other keys say is no mistake.
  EXPECT_TRUE(notes("gpt_oss", {{"layer_types", repeated({"sliding_attention", "full_attention"})}})
                  .empty());
}

/// The notes about keys without effect with these overrides.
std::vector<std::string> unused(const std::vector<std::string>& overrides,
                                std::uint64_t world = 2) {
  std::vector<std::string> all = {"optimizer.type=AdamW", "optimizer.params.weight_decay=0.01",
                                  "train_batch_size=16"};
  all.insert(all.end(), overrides.begin(), overrides.end());
  std::vector<std::string> found = parse_text(kMinimal, all, world).notes;
  std::erase_if(found, [](const std::string& note) {
    return note.find(": no effect, because ") == std::string::npos;
  });
  return found;
}

TEST(UnusedKeys, AreNotedWithTheReason) {
  using List = std::vector<std::string>;
  const std::vector<std::pair<List, List>> cases = {
      {{"checkpoint_keep=3"}, {"checkpoint_keep=3", "checkpoint_every=5"}},
      {{"spike.action=off", "spike.window=9"}, {"spike.action=warn", "spike.window=9"}},
      {{"spike.action=stop", "spike.most_rollbacks=9"},
       {"spike.action=rollback", "spike.most_rollbacks=9", "checkpoint_every=5"}},
      {{"fp16.hysteresis=5"}, {"fp16.hysteresis=5", "fp16.enabled=true"}},
      {{"fp16.enabled=true", "fp16.loss_scale=8", "fp16.hysteresis=5"},
       {"fp16.enabled=false", "fp16.hysteresis=5"}},
      {{"fp16.enabled=true", "max_skipped_steps=3"}, {"max_skipped_steps=3"}},
      {{"tensorboard.job_name=x"}, {"tensorboard.job_name=x", "tensorboard.enabled=true"}},
      {{"csv_monitor.output_path=x"}, {"csv_monitor.output_path=x", "csv_monitor.enabled=true"}},
      {{"weight_decay_exclude=transformers", "weight_decay=0"},
       {"weight_decay_exclude=transformers"}},
      {{"preference.beta=0.5"}, {}},
      {{"token_type=u16"}, {}},
      {{"held_out=0", "eval_every=5"}, {"eval_every=5"}},
      {{"expert_prefetch=true"}, {"expert_prefetch=false"}},
      {{"expert_updates=active"}, {}},
      {{"router_losses=micro_batch"}, {"router_losses=step"}},
      {{"aio.queue_depth=8"}, {"aio.queue_depth=8", "offload_param.device=nvme"}},
      {{"aio.queue_depth=8", "offload_param.device=cpu"},
       {"aio.queue_depth=8", "offload_param.device=auto"}},
      {{"stage3_param_persistence_threshold=9"},
       {"stage3_param_persistence_threshold=9", "zero_optimization.stage=3"}},
      {{"ballast.device=host", "kernels=plain"}, {"kernels=plain"}}};
  for (const auto& [given, used] : cases) {
    const List notes = unused(given);
    ASSERT_EQ(notes.size(), 1U) << given.front();
    EXPECT_TRUE(unused(used).empty()) << (used.empty() ? "" : used.front());
  }
  EXPECT_EQ(unused({"checkpoint_keep=3"}).front(),
            "ballast.checkpoint_keep: no effect, because the run writes no checkpoints "
            "(ballast.checkpoint_every)");
  EXPECT_EQ(unused({"comm_timeout_seconds=9"}, 1).size(), 1U);
  EXPECT_TRUE(unused({"comm_timeout_seconds=9"}, 2).empty());
  EXPECT_TRUE(unused({"comm_timeout_seconds=9"}, 0).empty());  // unknown
}

TEST(UnusedKeys, AreNoNewsInAPrintedConfig) {
  for (const std::string& text : test::samples()) {
    const Config c = parse_text(text);
    const Config again = config::parse(print(c), "/base", "c.json", {});
    for (const std::string& note : again.notes) {
      EXPECT_NE(std::ranges::find(c.notes, note), c.notes.end()) << note;
    }
  }
}

}  // namespace
}  // namespace ballast::config::unused_keys_test
