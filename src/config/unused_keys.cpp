// Keys whose values have no effect because of the values of other keys.

#include <algorithm>
#include <array>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "ballast/model/family.h"
#include "ballast/text/json.h"

#include "src/config/config_tree.h"
#include "src/config/key_table.h"
#include "src/model/description/layer_rules.h"

namespace ballast::config {
namespace {

/// Keys without effect if `unused` holds.
struct Rule {
  bool unused;
  std::string_view keys;  ///< separated by spaces
  std::string reason;
};

bool names_nvme(const Config& c) {
  const auto is_nvme = [](const std::optional<Tier>& tier) { return tier == Tier::nvme; };
  const bool sections = c.zero.optimizer.tier.value_or(Tier::nvme) == Tier::nvme ||
                        c.zero.parameters.tier.value_or(Tier::nvme) == Tier::nvme;
  return sections || is_nvme(c.ballast.activations) || is_nvme(c.ballast.gradients) ||
         std::ranges::any_of(c.ballast.placement, [&](const step::PlacementRule& rule) {
           return is_nvme(rule.weights) || is_nvme(rule.optimizer) || is_nvme(rule.activations) ||
                  is_nvme(rule.gradients);
         });
}

/// Whether a section without `enabled` is off. With `"enabled": false` its other keys are expected
/// to have no effect.
bool is_left_off(const Document& document, std::string_view section, bool on) {
  return !on && find_given(document.root(), fmt::format("{}.enabled", section)) == nullptr;
}

std::vector<Rule> rules_of_training(const Config& c, const Document& document) {
  const BallastSection& b = c.ballast;
  const bool half = c.type == DType::f16;
  const bool never_fails = half && c.fp16.loss_scale == 0.0;
  const bool eager = b.update == step::Update::eager;
  const bool dense = !model::any_has<model::ExpertsSpec>(model::layers_of(c.model));
  using Action = SpikeSection::Action;
  return {{is_left_off(document, "fp16", half),
           "fp16.loss_scale fp16.initial_scale_power fp16.loss_scale_window fp16.hysteresis "
           "fp16.consecutive_hysteresis fp16.min_loss_scale",
           "fp16.enabled is false"},
          {half && c.fp16.loss_scale != 0.0,
           "fp16.initial_scale_power fp16.loss_scale_window fp16.hysteresis "
           "fp16.consecutive_hysteresis fp16.min_loss_scale",
           "fp16.loss_scale is constant"},
          {is_left_off(document, "tensorboard", c.tensorboard.enabled),
           "tensorboard.output_path tensorboard.job_name", "tensorboard.enabled is false"},
          {is_left_off(document, "csv_monitor", c.csv_monitor.enabled),
           "csv_monitor.output_path csv_monitor.job_name", "csv_monitor.enabled is false"},
          {b.spike.action == Action::off,
           "ballast.spike.window ballast.spike.factor ballast.spike.most_rollbacks",
           "ballast.spike.action is \"off\""},
          {b.spike.action == Action::warn || b.spike.action == Action::stop,
           "ballast.spike.most_rollbacks", "ballast.spike.action is not \"rollback\""},
          {!b.writes_checkpoints(), "ballast.checkpoint_keep",
           "the run writes no checkpoints (ballast.checkpoint_every)"},
          {never_fails || eager, "ballast.max_skipped_steps",
           eager ? "ballast.update is \"eager\", which skips no step"
                 : "fp16.min_loss_scale ends the run of a dynamic loss scale"},
          {c.optimizer.weight_decay == 0.0, "ballast.weight_decay_exclude",
           "optimizer.params.weight_decay is 0"},
          {c.data.pairs.empty(), "ballast.preference.beta ballast.preference.label_smoothing",
           "there are no data.pairs"},
          {c.data.tokens.empty(), "data.token_type", "there are no data.tokens"},
          {c.data.held_out == 0.0 && c.data.eval.empty(),
           "ballast.eval_every ballast.eval_batches ballast.stop_at_loss",
           "data.held_out is 0 and data.eval is missing, so nothing is evaluated"},
          {dense, "ballast.expert_updates", "the model has no layers of experts"},
          {!model::router_losses(c.model).any(), "ballast.router_losses",
           "the model has no router losses"},
          // The planner decides false.
          {dense && b.expert_prefetch.value_or(false), "ballast.expert_prefetch",
           "the model has no layers of experts"}};
}

std::vector<Rule> rules_of_machine(const Config& c, std::uint64_t world) {
  const bool host = c.ballast.device == DeviceChoice::host;
  return {{!names_nvme(c),
           "aio.block_size aio.queue_depth aio.backend aio.in_flight_bytes aio.stall_seconds "
           "aio.abandon_seconds aio.sqpoll aio.iopoll aio.buffered",
           "only data on NVMe use it, and no tier of this config is nvme"},
          {c.zero.stage != 3,
           "zero_optimization.stage3_param_persistence_threshold "
           "zero_optimization.param_persistence_threshold",
           "zero_optimization.stage is not 3"},
          {world == 1 && c.zero.stage == 3,
           "zero_optimization.stage3_param_persistence_threshold "
           "zero_optimization.param_persistence_threshold zero_optimization.zero_quantized_weights",
           "a run of one rank shards nothing"},
          {world == 1, "ballast.comm_timeout_seconds", "the run has one rank"},
          {host,
           "ballast.kernels ballast.gpu_checks ballast.attention ballast.product_algorithms "
           "ballast.nvtx",
           "ballast.device is \"host\""}};
}

/// The effective values of a config without keys.
const Json& standard_values() {
  static const Json values = [] {
    Config config;
    return write_section(all_keys(config));
  }();
  return values;
}

/// Whether the config gives the key another value than its default. Printed configs have all keys.
bool is_chosen(const Document& document, std::string_view path) {
  const Json* const given = find_given(document.root(), path);
  if (given == nullptr || *given == "auto") return false;
  const Json* const standard = find_path(standard_values(), path);
  return standard == nullptr || !are_equal(*given, *standard);
}

void note(Config& c, const std::vector<std::string>& keys, std::string_view reason) {
  if (keys.empty()) return;
  c.notes.push_back(fmt::format("{}: no effect, because {}", fmt::join(keys, ", "), reason));
}

}  // namespace

void note_unused_model_keys(Config& c, const model::ModelConfig& given, const Document& document) {
  std::vector<std::string> keys;
  const Json* const section = document.root().find("model");
  for (const auto& member : section->members()) {
    const bool chosen = !member.value.is_null() && given.details.contains(member.key);
    // A folder describes its whole model.
    if (chosen && !document.is_replaced(fmt::format("model.{}", member.key))) {
      keys.push_back(member.key);
    }
  }
  keys = model::unused_keys(given, keys);
  for (std::string& key : keys) key = fmt::format("model.{}", key);
  note(c, keys, fmt::format("other keys of this {} model switch it off", c.model.family));
}

void note_unused_keys(Config& c, const Document& document, std::uint64_t world) {
  std::vector<Rule> rules = rules_of_training(c, document);
  std::ranges::move(rules_of_machine(c, world), std::back_inserter(rules));
  for (const Rule& rule : rules) {
    if (!rule.unused) continue;
    std::vector<std::string> keys;
    for (const std::string_view key : text::words_of(rule.keys)) {
      if (is_chosen(document, key)) keys.emplace_back(key);
    }
    note(c, keys, rule.reason);
  }
}

}  // namespace ballast::config
