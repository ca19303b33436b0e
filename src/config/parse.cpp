#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include "ballast/config/checkpoint_config.h"
#include "ballast/config/config.h"
#include "ballast/config/model_source.h"
#include "ballast/core/error.h"
#include "ballast/model/slots.h"
#include "ballast/text/files.h"

#include "src/config/json_values.h"
#include "src/config/sections.h"
#include "src/config/short_path.h"

namespace ballast::config {

void expand_model_path(Document& document, std::vector<std::string>& notes) {
  const Json* const given = find_given(document.root(), "model.path");
  if (given == nullptr || *given == "") return;
  const Json* const model = document.root().find("model");
  const std::filesystem::path folder = Value(document, *given, "model.path").path_text();
  // Keys that no config.json has, those of training alone, and one that may be switched off.
  constexpr std::array kOwn = {
      "vocabulary_tiles",     "layer_tiles",          "router_bias_update_speed",
      "output_router_logits", "router_aux_loss_coef", "router_z_loss_coef",
      model::kPadToken};
  for (const auto& member : model->members()) {
    const bool own = std::find(kOwn.begin(), kOwn.end(), member.key) != kOwn.end();
    const bool skipped = own || member.value.is_null() || is_comment(member.key);
    if (member.key == "path" || skipped) continue;
    document.fail(fmt::format("model.{}", printable(member.key)),
                  fmt::format("model.path ({}) is given too and sets the whole model; remove one",
                              folder.string()));
  }
  if (const auto cause = explain_no_model(folder, given->text())) {
    document.fail("model.path", *cause);
  }
  Json section;
  try {
    section = read_model_section(folder, notes);
  } catch (const Error& error) {
    document.fail("model.path", error.what());
  }
  section["weights"] = folder.string();
  for (const char* key : kOwn) {
    const bool null_counts = key == std::string_view(model::kPadToken);
    const Json* const value = null_counts ? model->find(key) : find_given(*model, key);
    if (value != nullptr) section[key] = *value;
  }
  document.replace_section("model", std::move(section),
                           fmt::format("from {}", (folder / kCheckpointConfig).string()));
}

Config load(const std::filesystem::path& file, std::span<const std::string> overrides,
            std::uint64_t world) {
  return parse(text::read_settings(file, "config"), std::filesystem::absolute(file).parent_path(),
               file.string(), overrides, world);
}

Config parse(const std::string& text, const std::filesystem::path& base, const std::string& name,
             std::span<const std::string> overrides, std::uint64_t world) {
  Document document(text, base, name, overrides, whole_path);
  Config config;
  map_deprecated(document, config.notes);
  fill_in_optimizer(document, config.notes);
  replace_auto(document, config.notes);
  expand_model_path(document, config.notes);
  expand_adapter_path(document);
  read_section(Value(document, document.root(), ""), all_keys(config));
  complete(config, document, world);
  return config;
}

std::string print(const Config& config) {
  Config copy = config;  // the key table needs mutable fields
  return write_section(all_keys(copy)).pretty() + "\n";
}

}  // namespace ballast::config
