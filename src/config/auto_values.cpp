#include <algorithm>
#include <array>

#include <fmt/format.h>

#include "src/config/json_values.h"
#include "src/config/sections.h"

namespace ballast::config {
namespace {

struct AutoValue {
  std::string_view path;
  Json value;  ///< null: the key's own default
  std::string_view source;
};

/// The keys that Hugging Face's integration fills in from its TrainingArguments, and the values
/// that it would use if the user had set none (transformers 5.23, training_args.py). Keys that
/// support "auto" themselves (batch sizes, buckets, thresholds) are not included.
std::vector<AutoValue> auto_values(Json& root) {
  constexpr std::string_view kTheirs = "the default of transformers";
  const Json* const steps = find_path(root, "ballast.steps");
  const Json* const fp16 = find_path(root, "fp16.enabled");
  const bool half = fp16 != nullptr && fp16->is_boolean() && fp16->flag();
  return {{"gradient_clipping", 1.0, kTheirs},
          {"optimizer.params.lr", 5e-5, kTheirs},
          {"optimizer.params.betas", Json::array({0.9, 0.999}), kTheirs},
          {"optimizer.params.eps", 1e-8, kTheirs},
          {"optimizer.params.weight_decay", 0.0, kTheirs},
          {"scheduler.params.warmup_min_lr", 0.0, kTheirs},
          {"scheduler.params.warmup_max_lr", {}, "optimizer.params.lr"},
          {"scheduler.params.warmup_num_steps", 2, "DeepSpeed's least, because transformers has 0"},
          {"scheduler.params.total_num_steps", steps == nullptr ? Json() : *steps, "ballast.steps"},
          {"bf16.enabled", !half, half ? "fp16 is used" : "which needs no loss scale"},
          {"fp16.enabled", false, "bf16 is used, unless it is off"}};
}

/// Sections in which DeepSpeed ignores every key whose value is "auto", and the keys in them for
/// which "auto" has a meaning here.
constexpr std::array kDropsAuto = {"zero_optimization",
                                   "zero_optimization.offload_optimizer",
                                   "zero_optimization.offload_param",
                                   "fp16",
                                   "bf16",
                                   "tensorboard",
                                   "csv_monitor"};
constexpr std::array<std::string_view, 4> kHaveAuto = {"device", "sub_group_size",
                                                       "stage3_param_persistence_threshold",
                                                       "param_persistence_threshold"};

/// Replaces "auto" by null, which means the default, where DeepSpeed ignores the key.
void drop_auto(Json& root, std::vector<std::string>& log) {
  for (const char* const section : kDropsAuto) {
    Json* const found = find_path(root, section);
    if (found == nullptr) continue;
    const std::string_view path = section;
    const std::string_view name = path.substr(path.find('.') + 1);
    for (const Json::Member& member : std::vector(found->members())) {
      const bool own = std::find(kHaveAuto.begin(), kHaveAuto.end(), member.key) != kHaveAuto.end();
      if (own || !(member.value == "auto") || has_no_effect(name, member.key)) continue;
      (*found)[member.key] = Json();
      log.push_back(fmt::format("{}.{}: \"auto\" is the default", section, printable(member.key)));
    }
  }
}

}  // namespace

void replace_auto(Document& document, std::vector<std::string>& log) {
  Json& root = document.root();
  for (const AutoValue& known : auto_values(root)) {
    Json* const found = find_path(root, known.path);
    if (found == nullptr || !(*found == "auto")) continue;
    *found = known.value;
    log.push_back(fmt::format("{}: \"auto\" is {}{}", known.path,
                              known.value.is_null() ? "" : known.value.compact() + ", ",
                              known.source));
  }
  drop_auto(root, log);
}

}  // namespace ballast::config
