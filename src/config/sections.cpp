#include "src/config/sections.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <optional>
#include <set>
#include <string>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/core/suggest.h"
#include "ballast/model/family.h"

#include "src/model/spec/families/unused_keys.h"

namespace ballast::config {
namespace {

/// Choosing a family sets its defaults, so this key is read first.
Key family_key(model::ModelConfig& m) {
  Key key = choice("family", m.family, model::family_names());
  key.read = [read = std::move(key.read), &m](const Value& value) {
    read(value);
    m = model::default_config(m.family);
  };
  return key;
}

/// A value whose type is that of `standard`. If that is null: an object, a list or a number.
Json read_detail(const Value& value, const Json& standard) {
  if (standard.is_number()) {
    const double given = value.real({.low = std::numeric_limits<double>::lowest()});
    // Transformers refuses 24.0 if it needs a whole number.
    const bool whole = standard.whole() && given == std::floor(given) && given >= 0.0 &&
                       given <= static_cast<double>(std::uint64_t{1} << 53U);
    return whole ? Json(static_cast<std::uint64_t>(given)) : Json(given);
  }
  if (standard.is_boolean()) return value.flag();
  if (standard.is_string()) return value.text();
  const Json& given = value.json();
  if (given.is_string() || given.is_boolean()) value.fail_type("an object, a list or a number");
  return given;
}

/// Keys that only some families have. Others refuse them.
Section detail_keys(model::ModelConfig& m) {
  Section keys;
  std::set<std::string> names;
  for (const std::string& family : model::family_names()) {
    for (const model::DetailKey& detail : model::family(family).details()) {
      if (!names.insert(detail.name).second) continue;
      const auto read = [&m, detail](const Value& value) {
        if (!m.details.contains(detail.name)) {
          value.fail(fmt::format("has no effect for the family {} (it is for {}); remove it",
                                 m.family, listed(model::families_with_key(detail.name))));
        }
        m.details[detail.name] = read_detail(value, detail.standard);
      };
      const bool own = m.details.contains(detail.name);
      const auto write = [&m, name = detail.name] { return m.detail(name); };
      keys.push_back({detail.name, read, own ? std::function<Json()>(write) : nullptr});
    }
  }
  return keys;
}

/// Unless it is empty, expand_model_path() has replaced it.
Key model_path_key() {
  Key key = {"path", [](const Value& value) { static_cast<void>(value.text()); }, nullptr};
  key.names_paths = true;
  return key;
}

Section model_keys(Config& c) {
  model::ModelConfig& m = c.model;
  Section keys = {
      family_key(m),
      whole("vocab_size", m.vocab_size, {1, 0x7fffffffU}),
      also_called(whole("hidden_size", m.hidden_size, {1, 1U << 20U}), {"n_embd", "d_model"}),
      also_called(whole("num_layers", m.num_layers, {1, 1U << 16U}),
                  {"num_hidden_layers", "n_layer", "layers"}),
      also_called(whole("num_heads", m.num_heads, {1, 1U << 16U}),
                  {"num_attention_heads", "n_head", "heads"}),
      also_called(whole("num_kv_heads", m.num_kv_heads, {0, 1U << 16U}),
                  {"num_key_value_heads", "kv_heads"}),
      whole("head_dim", m.head_dim, {0, 1U << 16U}),
      also_called(whole("intermediate_size", m.intermediate_size, {0, 1U << 24U}), {"n_inner"}),
      also_called(whole("max_sequence", m.max_sequence, {0, 1U << 30U}),
                  {"max_position_embeddings", "n_positions"}),
      also_called(real("norm_epsilon", m.norm_epsilon, kPositive),
                  {"rms_norm_eps", "layer_norm_epsilon"}),
      also_called(flag("tie_embeddings", m.tie_embeddings), {"tie_word_embeddings"}),
      or_auto(whole("vocabulary_tiles", m.vocabulary_tiles, {1, 1U << 28U}), m.vocabulary_tiles),
      or_auto(whole("layer_tiles", m.layer_tiles, {1, 1U << 20U}), m.layer_tiles),
      also_called(real("init_stddev", m.init_stddev, kPositive), {"initializer_range"}),
      real("router_bias_update_speed", c.router_bias_update_speed, kNotNegative),
      path("weights", c.initial_weights),
      model_path_key()};
  const Section details = detail_keys(m);
  keys.insert(keys.end(), details.begin(), details.end());
  return keys;
}

constexpr RealRange kHeldOut = {.low = 0.0, .high = 0.5};
constexpr double kInfinite = std::numeric_limits<double>::infinity();

/// Files, or a share like held_out. With files, none of the training data is held out by default.
Key eval_key(DataSection& d) {
  Key key = path_list("eval", d.eval);
  key.read = [read = std::move(key.read), &d](const Value& value) {
    if (value.json().is_number()) {
      d.held_out = value.real(kHeldOut);
      return;
    }
    if (!value.json().is_string() && !value.json().is_array()) {
      value.fail_type("a share of the data, a path or an array of paths");
    }
    read(value);
    if (!d.eval.empty()) d.held_out = 0.0;
  };
  return key;
}

/// Must be read after eval.
Key held_out_key(DataSection& d) {
  return {"held_out",
          [&d](const Value& value) {
            const double share = value.real(kHeldOut);
            if (share != 0.0 && !d.eval.empty()) {
              value.fail("data.eval names files for evaluation; give one of them");
            }
            d.held_out = share;
          },
          [&d] { return Json(d.held_out); }};
}

Section data_keys(DataSection& d) {
  return {path_list("text", d.text),
          path_list("tokens", d.tokens),
          path_list("documents", d.documents),
          path_list("pairs", d.pairs),
          choice("token_type", d.token_type),
          also_called(whole("sequence_length", d.sequence_length, {1, 1U << 30U}),
                      {"seq_len", "block_size", "context_length"}),
          eval_key(d),
          held_out_key(d),
          flag("shuffle", d.shuffle),
          flag("as_is", d.as_is)};
}

/// `text` as a block number; empty if it is not one.
std::optional<std::uint64_t> block_number(std::string_view text) {
  std::uint64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  const bool whole_text = end == text.data() + text.size();
  return error == std::errc() && whole_text ? std::optional(number) : std::nullopt;
}

void read_blocks(const Value& value, PlacementRule& rule) {
  if (value.json().is_number()) {
    rule.first_block = rule.last_block = value.whole({});
    return;
  }
  const std::string_view expected = "a block number, a range such as \"0-3\" or \"all\"";
  if (!value.json().is_string()) value.fail_type(expected);
  const std::string text = value.json().text();
  if (text == "all") {
    rule.first_block = 0;
    rule.last_block = std::numeric_limits<std::uint64_t>::max();  // complete() replaces it
    return;
  }
  const std::size_t dash = text.find('-');
  const auto first = block_number(std::string_view(text).substr(0, dash));
  const auto last =
      dash == std::string::npos ? first : block_number(std::string_view(text).substr(dash + 1));
  if (!first || !last) value.fail_type(expected);
  if (*first > *last) value.fail(fmt::format("the range {} ends before it starts", text));
  rule.first_block = *first;
  rule.last_block = *last;
}

using Choices = std::vector<std::string>;
const Choices kTierChoices = {"device", "host", "nvme", "cpu"};
const Choices kBelowDevice = {"host", "nvme", "cpu"};

Key rule_tier(std::string name, std::optional<Tier>& tier, const Choices& choices = kTierChoices) {
  const auto read = [&tier, &choices](const Value& value) {
    const std::string found = value.choice(choices);
    tier = found == "device" ? Tier::device : found == "nvme" ? Tier::nvme : Tier::host;
  };
  return with_values(
      {std::move(name), read, [&tier] { return tier ? Json(to_string(*tier)) : Json(); }}, choices);
}

bool read_flag(const Value& value) {
  return value.flag();
}

/// `recompute`: true, false, or "except_attention".
Key recompute_key(std::optional<step::Kept>& kept, const Json& missing) {
  constexpr const char* kAttention = "except_attention";
  const auto read = [&kept, missing](const Value& value) {
    kept.reset();
    if (value.is_auto() && !missing.is_null()) return;
    if (value.json() == kAttention) {
      kept = step::Kept::attention;
    } else if (value.json().is_boolean()) {
      kept = value.flag() ? step::Kept::nothing : step::Kept::all;
    } else {
      value.fail_type("true, false or \"except_attention\"");
    }
  };
  const auto write = [&kept, missing] {
    if (!kept) return missing;
    return *kept == step::Kept::attention ? Json(kAttention) : Json(*kept == step::Kept::nothing);
  };
  return with_values({"recompute", read, write}, {"auto", "true", "false", kAttention});
}

Section rule_keys(PlacementRule& rule) {
  const auto write_blocks = [&rule] {
    if (rule.first_block == rule.last_block) return Json(rule.first_block);
    return Json(fmt::format("{}-{}", rule.first_block, rule.last_block));
  };
  return {{"blocks", [&rule](const Value& value) { read_blocks(value, rule); }, write_blocks},
          rule_tier("weights", rule.weights),
          rule_tier("optimizer", rule.optimizer),
          rule_tier("activations", rule.activations),
          rule_tier("gradients", rule.gradients, kBelowDevice),
          recompute_key(rule.kept, {})};
}

Key placement_key(std::vector<PlacementRule>& rules) {
  const auto read = [&rules](const Value& value) {
    rules.clear();
    for (const Value& item : value.elements("an array of rules")) {
      PlacementRule rule;
      read_section(item, rule_keys(rule));
      if (item.json().find("blocks") == nullptr) item.fail("lacks \"blocks\"; add it");
      if (!rule.weights && !rule.optimizer && !rule.activations && !rule.gradients && !rule.kept) {
        item.fail(
            "has no effect; add \"weights\", \"optimizer\", \"activations\", \"gradients\" or "
            "\"recompute\"");
      }
      rules.push_back(rule);
    }
  };
  const auto write = [&rules] {
    Json out = Json::array();
    for (auto& rule : rules) out.push_back(write_section(rule_keys(rule)));
    return out;
  };
  return {"placement", read, write};
}

/// A tier or "auto".
Key tier_key(Key key, TierChoice& tier) {
  key.read = [read = std::move(key.read), &tier](const Value& value) {
    tier.reset();
    if (!value.is_auto()) read(value);
  };
  key.write = [&tier] { return tier ? Json(to_string(*tier)) : Json("auto"); };
  key.values.emplace_back("auto");
  return key;
}

Key flag_or_auto(const char* name, std::optional<bool>& choice) {
  return with_values(optional_key<bool>(name, choice, "auto", read_flag),
                     {"auto", "true", "false"});
}

Key whole_or(const char* name, std::optional<std::uint64_t>& target, const Json& missing,
             WholeRange range) {
  return optional_key<std::uint64_t>(name, target, missing,
                                     [range](const Value& value) { return value.whole(range); });
}

Key numa_node_key(std::optional<int>& node) {
  return optional_key<int>("update_numa_node", node, "auto", [](const Value& value) {
    return static_cast<int>(value.whole({0, 1023}));
  });
}

Section ballast_keys(BallastSection& b, step::BufferCounts& buffers) {
  constexpr WholeRange kBudget = {1, std::uint64_t{1} << 53U};
  constexpr WholeRange kThreads = {0, 4096};
  constexpr WholeRange kAnyNumber = {0, std::numeric_limits<std::uint64_t>::max()};
  return {choice("device", b.device),
          choice("kernels", b.kernels),
          choice("gpu_checks", b.gpu_checks),
          choice("attention", b.attention),
          choice("product_algorithms", b.product_algorithms),
          devices_key(b.devices),
          or_auto(bytes("device_bytes", b.device_bytes, kBudget), b.device_bytes),
          or_auto(bytes("host_bytes", b.host_bytes, kBudget), b.host_bytes),
          also_called(train_key(b), {"trainable", "trained", "unfrozen_parameters"}),
          also_called(adapters_key(b), {"lora", "peft", "peft_config", "adapter"}),
          also_called(weight_decay_exclude_key(b), {"no_decay", "no_weight_decay"}),
          also_called(preference_key(b.preference), {"dpo", "dpo_config"}),
          also_called(choice("quantized_base", b.quantized_base),
                      {"quantization", "quantization_config", "bnb_4bit_quant_type"}),
          also_called(flag("double_quantization", b.double_quantization),
                      {"bnb_4bit_use_double_quant"}),
          choice("order", b.order),
          choice("update", b.update),
          whole_or("speculative_updates", b.speculative_updates, "auto", {0, 1U << 17U}),
          choice("expert_updates", b.expert_updates),
          flag_or_auto("expert_prefetch", b.expert_prefetch),
          also_called(or_auto(whole("expert_parallel", b.expert_parallel, {1, 1U << 16U}),
                              b.expert_parallel),
                      {"ep_size", "expert_parallel_size", "expert_model_parallel_size"}),
          flag("serial", b.serial),
          flag("nvtx", b.nvtx),
          whole_or("delay_seed", b.delay_seed, {}, kAnyNumber),
          tier_key(rule_tier("activations", b.activations), b.activations),
          tier_key(rule_tier("gradients", b.gradients, kBelowDevice), b.gradients),
          also_called(recompute_key(b.kept, "auto"),
                      {"gradient_checkpointing", "checkpoint_activations"}),
          buffers_key("ballast.device_weight_buffers", buffers),
          buffers_key("ballast.device_gradient_buffers", buffers),
          buffers_key("ballast.activation_buffers", buffers),
          buffers_key("ballast.gradient_buffers", buffers),
          or_auto(whole("compute_threads", b.compute_threads, kThreads), b.compute_threads),
          or_auto(whole("update_threads", b.update_threads, kThreads), b.update_threads),
          choice("update_isa", b.update_isa),
          numa_node_key(b.update_numa_node),
          choice("optimizer_states", b.optimizer_states),
          real("link_gbps", b.link_gbps, kNotNegative),
          placement_key(b.placement),
          also_called(whole("steps", b.steps, kSteps), {"max_steps", "train_steps"}),
          whole("seed", b.seed, kAnyNumber),
          whole("eval_every", b.eval_every, kSteps),
          whole("eval_batches", b.eval_batches, {1, kSteps.high}),
          also_called(flag("save_weights", b.save_weights), {"save_model", "save_checkpoint"}),
          also_called(checkpoint_every_key(b), {"save_every", "save_steps"}),
          also_called(whole("checkpoint_keep", b.checkpoint_keep, {1, 1024}), {"save_total_limit"}),
          whole("max_skipped_steps", b.max_skipped_steps, {1, kSteps.high}),
          also_called(spike_key(b.spike), {"loss_spike", "on_spike"}),
          choice("on_error", b.on_error),
          real("comm_timeout_seconds", b.comm_timeout_seconds, kSeconds),
          also_called(path("out", b.out), {"output", "out_dir", "output_dir"})};
}

Section bf16_keys(Config& c) {
  Key enabled = {"enabled",
                 [&c](const Value& value) { c.type = value.flag() ? DType::bf16 : DType::f32; },
                 [&c] { return Json(c.type == DType::bf16); }};
  return with_deepspeed_keys({with_values(std::move(enabled), {"true", "false"})}, "bf16",
                             c.ignored);
}

Section fp16_keys(Config& c) {
  Fp16Section& f = c.fp16;
  Key enabled = {"enabled",
                 [&c](const Value& value) {
                   if (value.flag()) c.type = DType::f16;
                 },
                 [&c] { return Json(c.type == DType::f16); }};
  return with_deepspeed_keys({with_values(std::move(enabled), {"true", "false"}),
                              real("loss_scale", f.loss_scale, kNotNegative),
                              whole("initial_scale_power", f.initial_scale_power, {0, 63}),
                              whole("loss_scale_window", f.loss_scale_window, {1, kSteps.high}),
                              whole("hysteresis", f.hysteresis, {1, kSteps.high}),
                              flag("consecutive_hysteresis", f.consecutive_hysteresis),
                              real("min_loss_scale", f.min_loss_scale, kPositive)},
                             "fp16", c.ignored);
}

Section monitor_keys(MonitorSection& monitor) {
  Key name = {"job_name",
              [&monitor](const Value& value) {
                const std::filesystem::path folder = value.text();
                if (folder.empty() || folder.is_absolute()) {
                  value.fail("expected the name of a folder in output_path");
                }
                monitor.job_name = folder.string();
              },
              [&monitor] { return Json(monitor.job_name); }};
  return {flag("enabled", monitor.enabled), path("output_path", monitor.output_path),
          std::move(name)};
}

Section activation_checkpointing_keys(Config& c) {
  // DeepSpeed's name for ballast.activations "host", which print() writes.
  Key on_host = {"cpu_checkpointing",
                 [&c](const Value& value) {
                   if (value.flag()) c.ballast.activations = Tier::host;
                 },
                 [] { return Json(false); }};
  return with_deepspeed_keys(
      {accepted_only(std::move(on_host)), flag("partition_activations", c.partition_activations)},
      "activation_checkpointing", c.ignored);
}

Key gradient_allreduce_op_key() {
  return {"gradient_allreduce_op",
          [](const Value& value) {
            if (value.text() != "mean") value.fail("gradients are averaged; use \"mean\"");
          },
          {}};
}

/// Accelerate writes an infinite number to switch progress lines off.
Key steps_per_print_key(std::uint64_t& steps) {
  Key key = whole("steps_per_print", steps, {1, kNoProgressLines});
  key.read = [read = std::move(key.read), &steps](const Value& value) {
    const Json& json = value.json();
    const bool written = json == "inf" || json == "Infinity";
    if (!written && !(json.is_number() && json.number() == kInfinite)) return read(value);
    steps = kNoProgressLines;
  };
  return key;
}

Key batch_key(std::string name, std::uint64_t& target) {
  return or_auto(whole(std::move(name), target, {1, std::uint64_t{1} << 32U}), target);
}

/// A batch key that the planner may choose: "auto" is read and printed as "auto".
Key planned_batch_key(std::string name, std::uint64_t& target, bool& automatic) {
  Key key = batch_key(std::move(name), target);
  key.read = [read = std::move(key.read), &automatic](const Value& value) {
    if (value.is_auto()) automatic = true;
    read(value);
  };
  key.write = [write = std::move(key.write), &automatic] {
    return automatic ? Json("auto") : write();
  };
  return key;
}

}  // namespace

Key buffers_key(std::string_view path, step::BufferCounts& buffers) {
  const auto* const kind = std::find_if(kBufferKinds.begin(), kBufferKinds.end(),
                                        [path](const BufferKind& one) { return one.key == path; });
  expects(kind != kBufferKinds.end(), "a number of buffers must be in the table");
  return whole(std::string(path.substr(path.rfind('.') + 1)), buffers.*(kind->count),
               {0, BufferKind::kMost});
}

Section all_keys(Config& c) {
  return with_deepspeed_keys(
      {section("model", [&c] { return model_keys(c); }),
       section("data", [&c] { return data_keys(c.data); }),
       batch_key("train_batch_size", c.batch.train_batch),
       planned_batch_key("train_micro_batch_size_per_gpu", c.batch.micro_batch, c.batch.automatic),
       planned_batch_key("gradient_accumulation_steps", c.batch.accumulation, c.batch.automatic),
       section("optimizer", [&c] { return optimizer_keys(c.optimizer, c.ignored); }),
       section("scheduler", [&c] { return scheduler_keys(c.scheduler); }),
       also_called(whole("sequence_parallel_size", c.sequence_parallel, {0, 1U << 16U}),
                   {"sp_size", "context_parallel_size", "ulysses_sequence_parallel_size"}),
       section("tensor_parallel",
               [&c] { return tensor_parallel_keys(c.tensor_parallel, c.ignored); }),
       real("gradient_clipping", c.gradient_clipping, kNotNegative),
       steps_per_print_key(c.steps_per_print),
       switched_section(
           "tensorboard", [&c] { return monitor_keys(c.tensorboard); }, c.ignored),
       switched_section(
           "csv_monitor", [&c] { return monitor_keys(c.csv_monitor); }, c.ignored),
       switched_section(
           "bf16", [&c] { return bf16_keys(c); }, c.ignored),
       switched_section(
           "fp16", [&c] { return fp16_keys(c); }, c.ignored),
       section("zero_optimization", [&c] { return zero_keys(c.zero, c.buffers, c.ignored); }),
       section("pipeline", [&c] { return pipeline_keys(c.pipeline, c.ignored); }),
       section("aio", [&c] { return aio_keys(c.aio, c.ignored); }),
       section("activation_checkpointing", [&c] { return activation_checkpointing_keys(c); }),
       section("ballast", [&c] { return ballast_keys(c.ballast, c.buffers); }),
       gradient_allreduce_op_key()},
      "", c.ignored);
}

std::vector<KeyInfo> key_list() {
  Config config;
  std::vector<KeyInfo> list;
  list_keys(all_keys(config), "", list);
  return list;
}

}  // namespace ballast::config
