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

void fill_in_optimizer(Document& document, std::vector<std::string>& notes) {
  Json& root = document.root();
  const Json* const given = find_given(root, "optimizer");
  const bool absent = given == nullptr || document.is_set("optimizer");
  if (!absent || find_given(root, "optimizer.type") != nullptr) return;
  if (given != nullptr && !given->is_object()) return;  // is refused when it is read
  Json params = Json::object();
  if (const Json* const own = find_given(root, "optimizer.params")) params = *own;
  if (!params.is_object()) return;
  const Json standard = Json::object(
      {{"lr", 5e-5}, {"betas", Json::array({0.9, 0.999})}, {"eps", 1e-8}, {"weight_decay", 0.0}});
  for (const auto& member : standard.members()) {
    if (find_given(params, member.key) == nullptr) params[member.key] = member.value;
  }
  root["optimizer"]["type"] = "AdamW";
  root["optimizer"]["params"] = params;
  const bool scheduled = find_given(root, "scheduler") != nullptr;
  if (!scheduled) root["scheduler"] = Json::object({{"type", "linear"}});
  notes.push_back(fmt::format(
      "optimizer: not given, so it is that of transformers' Trainer: AdamW with learning rate {} "
      "and weight_decay {}{}; give the section to choose",
      params.find("lr")->compact(), params.find("weight_decay")->compact(),
      scheduled ? "" : ", and the learning rate falls linearly to 0"));
}

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
