#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "ballast/core/error.h"
#include "ballast/model/family.h"

#include "src/config/key_table.h"

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

/// Families with latent attention, which the documentation names together.
bool is_latent(const std::string& family) {
  const auto details = model::family(family).details();
  return std::ranges::any_of(
      details, [](const model::DetailKey& key) { return key.name == "kv_lora_rank"; });
}

/// Families of other programs may have keys without a text.
KeyText text_of(std::string_view name) {
  const model::KeyText text = model::text_of_key(name);
  return {text.meaning, text.standard, text.range};
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
      keys.push_back(row(kResultsAndPlan,
                         {detail.name, read, own ? std::function<Json()>(write) : nullptr},
                         text_of(detail.name)));
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

/// Keys of the sizes of all families.
Section size_keys(model::ModelConfig& m) {
  return {
      row(kResultsAndPlan, family_key(m), text_of("family")),
      row(kResultsAndPlan, whole("vocab_size", m.vocab_size, {1, 0x7fffffffU}),
          {"number of token ids", "256",
           "1 to 2^31 - 1; at least 256 with `data.text`; at most 65536 with `data.token_type` "
           "`u16`"}),
      row(kResultsAndPlan,
          also_called(whole("hidden_size", m.hidden_size, {1, 1U << 20U}), {"n_embd", "d_model"}),
          {"width of the residual stream", "required",
           "1 to 2^20; a multiple of `num_heads` unless `head_dim` is given"}),
      row(kResultsAndPlan,
          also_called(whole("num_layers", m.num_layers, {1, 1U << 16U}),
                      {"num_hidden_layers", "n_layer", "layers"}),
          {"transformer layers", "required", "1 to 65536"}),
      row(kResultsAndPlan,
          also_called(whole("num_heads", m.num_heads, {1, 1U << 16U}),
                      {"num_attention_heads", "n_head", "heads"}),
          {"attention heads", "required", "1 to 65536"}),
      row(kResultsAndPlan,
          also_called(whole("num_kv_heads", m.num_kv_heads, {0, 1U << 16U}),
                      {"num_key_value_heads", "kv_heads"}),
          text_of("num_kv_heads")),
      row(kResultsAndPlan, whole("head_dim", m.head_dim, {0, 1U << 16U}),
          {"width of one head; attention is `num_heads` x `head_dim` wide",
           "`hidden_size` / `num_heads`; [latent attention](models.md#latent-attention): "
           "`qk_nope_head_dim` "
           "+ `qk_rope_head_dim`",
           "0 to 65536; 0: the default; even with rotary positions; on device `cuda` a multiple of "
           "8, at most 512"}),
      row(kResultsAndPlan,
          also_called(whole("intermediate_size", m.intermediate_size, {0, 1U << 24U}), {"n_inner"}),
          text_of("intermediate_size")),
      row(kResultsAndPlan,
          also_called(whole("max_sequence", m.max_sequence, {0, 1U << 30U}),
                      {"max_position_embeddings", "n_positions"}),
          {"longest sequence, in tokens", "`data.sequence_length`",
           "`data.sequence_length` to 2^30; 0: the default"})};
}

Section other_keys(Config& c) {
  model::ModelConfig& m = c.model;
  return {
      row(kResultsAndPlan,
          also_called(real("norm_epsilon", m.norm_epsilon, kPositive),
                      {"rms_norm_eps", "layer_norm_epsilon"}),
          {"added to the variance in norms", "1e-5", "above 0"}),
      row(kResultsAndPlan,
          also_called(flag("tie_embeddings", m.tie_embeddings), {"tie_word_embeddings"}),
          text_of("tie_embeddings")),
      row(kPlanOnly,
          or_auto(whole("vocabulary_tiles", m.vocabulary_tiles, {1, 1U << 28U}),
                  m.vocabulary_tiles),
          {"blocks into which the rows of the embedding and of the output matrix are cut, see "
           "[tiles](memory.md#tiles)",
           "chosen by size", "at most one per 16 tokens"}),
      row(kPlanOnly, or_auto(whole("layer_tiles", m.layer_tiles, {1, 1U << 20U}), m.layer_tiles),
          text_of("layer_tiles")),
      row(kPlanOnly,
          also_called(real("init_stddev", m.init_stddev, kPositive), {"initializer_range"}),
          {"standard deviation of the initial weights", "0.02", "above 0"}),
      row(kResultsAndPlan,
          real("router_bias_update_speed", c.router_bias_update_speed, kNotNegative),
          {"change of the corrections of [sigmoid routers](models.md#sigmoid-routers) per update, "
           "towards "
           "equal loads of the experts. With 0 they stay as they are. Not with adapters",
           "0", "at least 0"}),
      row(kNeither, path("weights", c.initial_weights),
          {"initial weights with Hugging Face's names: a safetensors file, a folder, or the index "
           "of a sharded model, see [initial weights](models.md#initial-weights)",
           "none: random from `ballast.seed`", "path"}),
      row(kNeither, model_path_key(),
          {"Hugging Face folder: its `config.json` gives all other keys of `model` except "
           "`vocabulary_tiles`, `layer_tiles` and those of training (`output_router_logits`, "
           "`router_aux_loss_coef`, `router_z_loss_coef`, `router_bias_update_speed`), and its "
           "weights are the initial weights, see [Hugging Face "
           "folders](models.md#hugging-face-folders)",
           "none", "path"})};
}

/// Lists families. Those with latent attention have one name if all of them are there.
std::string named_together(std::vector<std::string> families) {
  const std::vector<std::string> all = model::family_names();
  if (std::ranges::count_if(families, is_latent) == std::ranges::count_if(all, is_latent)) {
    std::erase_if(families, is_latent);
    families.emplace_back("latent attention");
  }
  return fmt::format("{}", fmt::join(families, ", "));
}

/// Lists the defaults of a key of the model section: the most common one, then those of the other
/// families.
std::string defaults_of(const std::string& key) {
  std::vector<std::pair<std::string, std::vector<std::string>>> defaults;
  for (std::string& name : model::families_with_key(key)) {
    const auto details = model::family(name).details();
    const Json& value = std::ranges::find(details, key, &model::DetailKey::name)->standard;
    std::string text = value.is_null() ? "none" : value.compact();
    if (value.is_number() && text.ends_with(".0")) text.resize(text.size() - 2);
    auto found = std::ranges::find(defaults, text, [](const auto& one) { return one.first; });
    if (found == defaults.end()) found = defaults.insert(found, {text, {}});
    found->second.push_back(std::move(name));
  }
  std::ranges::stable_sort(defaults, std::greater(),
                           [](const auto& one) { return one.second.size(); });
  std::string listed = defaults.front().first;
  for (const auto& [value, families] : std::span(defaults).subspan(1)) {
    listed += fmt::format("; {}: {}", named_together(families), value);
  }
  return listed;
}

}  // namespace

Section model_keys(Config& c) {
  return joined({size_keys(c.model), other_keys(c), detail_keys(c.model)});
}

void name_families(KeyInfo& row) {
  const std::vector<std::string> all = model::family_names();
  const auto put = [](std::string& text, std::string_view mark, const auto& names) {
    const std::size_t at = text.find(mark);
    if (at != std::string::npos) text.replace(at, mark.size(), names());
  };
  put(row.text.range, "{all families}",
      [&] { return fmt::format("`{}`", fmt::join(all, "`, `")); });
  put(row.text.initial, "{default family}", [&] { return all.front(); });
  put(row.text.initial, "{tying families}", [&] {
    std::vector<std::string> tying = all;
    std::erase_if(tying,
                  [](const std::string& name) { return !model::family(name).ties_embeddings(); });
    return fmt::format("{}", fmt::join(tying, ", "));
  });
  const std::string key = row.path.substr(row.path.find('.') + 1);
  put(row.text.meaning, "{families}",
      [&] { return named_together(model::families_with_key(key)); });
  put(row.text.initial, "{defaults}", [&] { return defaults_of(key); });
}

}  // namespace ballast::config
