#include <algorithm>
#include <array>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "ballast/calibrate/machine_rates.h"
#include "ballast/config/key_effects.h"
#include "ballast/core/error.h"
#include "ballast/core/units.h"
#include "ballast/device/device.h"
#include "ballast/memory/machine.h"
#include "ballast/setup/forecast.h"
#include "ballast/setup/run_plan.h"
#include "ballast/setup/translate.h"
#include "ballast/text/files.h"

namespace ballast::setup {
namespace {

using text::Json;

/// The member that marks a saved plan; its value is the version of the format.
constexpr std::string_view kMark = "ballast_plan";
constexpr std::uint64_t kForm = 1;

std::string device_of(const config::Config& config) {
  return std::string(device::kind_of(device_options(config)));
}

/// Returns the bytes of host memory that a run of `blueprint` allocates.
Bytes host_memory(const engine::Blueprint& blueprint, std::string_view device) {
  const Bytes host = blueprint.ledger.total(Tier::host);
  return device == "host" ? host + blueprint.ledger.total(Tier::device) : host;
}

/// A saved plan that is being read.
class PlanFile {
 public:
  explicit PlanFile(const std::filesystem::path& file)
      : name_(file.string()), json_(text::parse_json(text::read_settings(file, "plan"), name_)) {
    const Json* const mark = json_.is_object() ? json_.find(kMark) : nullptr;
    if (mark == nullptr) {
      throw Error(
          ErrorCategory::config,
          fmt::format("{}: not a saved plan; write one with ballast plan CONFIG --save FILE",
                      name_));
    }
    if (mark->whole() != kForm) {
      fail(fmt::format("it has format {}, but this version of the program reads format {}",
                       mark->compact(), kForm));
    }
  }

  [[noreturn]] void fail(const std::string& why,
                         ErrorCategory category = ErrorCategory::config) const {
    throw Error(category, fmt::format("{}: this plan does not fit: {}; make it again with ballast "
                                      "plan CONFIG --save FILE",
                                      name_, why));
  }

  [[nodiscard]] const Json& member(std::string_view key) const {
    const Json* const found = json_.find(key);
    if (found == nullptr) fail(fmt::format("it lacks \"{}\"", key));
    return *found;
  }
  [[nodiscard]] std::uint64_t whole(std::string_view key) const {
    const auto value = member(key).whole();
    if (!value) fail(fmt::format("\"{}\" must be a whole number", key));
    return *value;
  }
  /// Returns whether its version has choices in addition to the keys that change with them.
  [[nodiscard]] bool has_choices() const { return json_.find("choices") != nullptr; }
  [[nodiscard]] PlanChoices choices() const {
    try {
      return read_choices(member("choices"));
    } catch (const Error& error) {
      fail(error.what());
    }
  }
  [[nodiscard]] const std::string& name() const { return name_; }

 private:
  std::string name_;
  Json json_;
};

/// Whether a printed config trains on preference pairs.
bool has_pairs(const Json& config) {
  const Json* const data = config.find("data");
  const Json* const pairs = data == nullptr ? nullptr : data->find("pairs");
  return pairs != nullptr && pairs->is_array() && !pairs->elements().empty();
}

void check_config(const PlanFile& plan, const config::Config& config) {
  config::Settings now = config::all_settings(config);
  // Some keys depend on others, so the first difference may not be the user's.
  constexpr std::size_t kMaxNamed = 3;
  std::vector<std::string> differences;
  const auto note = [&](const std::string& path, const std::string& then, const std::string& here) {
    const bool free = config::effects_of(path).on_plan == config::PlanRole::free;
    if (free || differences.size() == kMaxNamed) return;
    differences.push_back(fmt::format("{} was {} for it and is {} now", path, then, here));
  };
  for_each_value(plan.member("config"), [&](const std::string& path, const Json& value) {
    const auto found = now.find(path);
    const std::string here = found == now.end() ? "missing" : found->second;
    if (value.compact() != here) note(path, value.compact(), here);
    now.erase(path);
  });
  for (const auto& [path, value] : now) note(path, "missing", value);
  if (!differences.empty()) plan.fail(fmt::format("{}", fmt::join(differences, ", ")));
}

}  // namespace

Json chosen_keys(const config::Config& asked, const config::Config& used) {
  const config::Settings before = config::all_settings(asked);
  Json chosen = Json::object();
  for_each_value(text::parse_json(config::print(used), "config"),
                 [&](const std::string& path, const Json& value) {
                   const auto found = before.find(path);
                   if (found == before.end() || found->second != value.compact()) {
                     chosen.add(path, value);
                   }
                 });
  return chosen;
}

text::OutputRule plan_rule(bool overwrite, std::vector<std::filesystem::path> inputs) {
  return {.kind = "a saved plan",
          .begins = fmt::format("{{\n  \"{}\": ", kMark),
          .overwrite = overwrite,
          .inputs = std::move(inputs)};
}

void save_plan(const std::filesystem::path& file, const text::OutputRule& rule,
               const config::Config& asked, const Forecast& forecast) {
  const engine::Blueprint& blueprint = forecast.decision.blueprint;
  const plan::Rates& rates = forecast.rates;
  const std::string device = rates.shared_cores > 0 ? "host" : "cuda";
  const Json plan =
      Json::object({{std::string(kMark), kForm},
                    {"predicted_step_seconds", forecast.decision.prediction.step_seconds},
                    {"world", blueprint.mesh.ranks()},
                    {"device", device},
                    {"documents", asked.has_positions()},
                    {"host_bytes", host_memory(blueprint, device)},
                    {"choices", choices_json(choices_of(blueprint))},
                    {"chosen", chosen_keys(asked, forecast.config)},
                    {"rates", calibrate::rates_json(rates)},
                    {"config", text::parse_json(config::print(asked), "config")}});
  text::write_output(file, rule, plan.pretty(2) + "\n");
}

void take_tiles(const std::filesystem::path& file, config::Config& config) {
  const PlanFile plan(file);
  const Json* const model = plan.member("config").find("model");
  const auto take = [&](bool open, std::string_view key, std::uint64_t& tiles) {
    const Json* const found = model == nullptr || !open ? nullptr : model->find(key);
    if (found != nullptr) tiles = found->whole().value_or(tiles);
  };
  take(config.open_tiles.vocabulary, "vocabulary_tiles", config.model.vocabulary_tiles);
  take(config.open_tiles.layers, "layer_tiles", config.model.layer_tiles);
}

AppliedPlan read_plan(const std::filesystem::path& file, const config::Config& config,
                      std::uint32_t world) {
  const PlanFile plan(file);
  check_config(plan, config);
  if (const std::uint64_t planned = plan.whole("world"); planned != world) {
    plan.fail(fmt::format("it is for {} rank{}, but this run has {}", planned,
                          planned == 1 ? "" : "s", world));
  }
  if (const std::string device = device_of(config); plan.member("device").text() != device) {
    plan.fail(fmt::format("its rates are those of device {}, but this run computes on {}",
                          plan.member("device").text(), device));
  }
  if ((plan.member("documents").text() == "true") != config.has_positions()) {
    plan.fail(config.has_positions() ? "it is for a stream of tokens, but the data are documents"
                                     : "it is for documents, but the data are a stream of tokens");
  }
  if (const bool pairs = !config.data.pairs.empty(); has_pairs(plan.member("config")) != pairs) {
    plan.fail(pairs ? "it is for single documents, but the data are preference pairs"
                    : "it is for preference pairs, but the data are single documents");
  }
  const Bytes needed = plan.whole("host_bytes");
  if (const Bytes available = memory::available_memory(); needed > available) {
    plan.fail(fmt::format("it needs {} of memory, but {} are available", format_bytes(needed),
                          format_bytes(available)),
              ErrorCategory::memory);
  }
  AppliedPlan applied = {.config = config};
  if (plan.has_choices()) {
    applied.chosen = plan.choices();
  } else {
    std::vector<std::string> keys;
    for (const auto& [key, value, at] : plan.member("chosen").members()) {
      keys.push_back(key + "=" + value.compact());
    }
    applied.config = config::parse(config::print(config), "/", plan.name(), keys, world);
  }
  applied.rates = calibrate::read_rates_json(plan.member("rates"), plan.name());
  return applied;
}

}  // namespace ballast::setup
