#include <algorithm>
#include <charconv>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include <fmt/format.h>

#include "src/checkpoint/format.h"

namespace ballast::checkpoint {
namespace {

namespace fs = std::filesystem;
using text::Json;

/// A field that must be equal, and the config key that sets it.
struct Field {
  const char* name;
  std::string_view key;
};

constexpr auto kAdapterFields =
    std::to_array<Field>({{"rank", "ballast.adapters.rank"},
                          {"alpha", "ballast.adapters.alpha"},
                          {"rank_pattern", "ballast.adapters.rank_pattern"},
                          {"alpha_pattern", "ballast.adapters.alpha_pattern"},
                          {"rslora", "ballast.adapters.rslora"},
                          {"dora", "ballast.adapters.dora"},
                          {"targets", "ballast.adapters.targets"}});
constexpr auto kBaseFields =
    std::to_array<Field>({{"format", "ballast.quantized_base"},
                          {"block", "elements per scale"},
                          {"double_quantization", "ballast.double_quantization"},
                          {"nested_block", "scales per scale of scales"}});

Json sorted_list(std::vector<std::string> names) {
  std::sort(names.begin(), names.end());
  Json list = Json::array();
  for (std::string& name : names) list.push_back(std::move(name));
  return list;
}

/// The rows of patterns in their order, which matters: "'q_proj': 4".
Json rows_of(const model::ModulePatterns& patterns) {
  Json list = Json::array();
  for (const model::ModulePatterns::Row& row : patterns.rows()) {
    list.push_back(fmt::format("'{}': {}", row.pattern, row.value));
  }
  return list;
}

/// Formats a value for a message: "nf4", "8", "true", "q_proj, v_proj".
std::string shown(const Json& value) {
  if (value.is_number()) return fmt::format("{}", value.number());
  if (!value.is_array()) return text::printable(value.text());
  if (value.elements().empty()) return "none";
  std::string list;
  for (const Json& name : value.elements()) list += (list.empty() ? "" : ", ") + name.text();
  return text::printable(list, 400);
}

/// Throws for the first of `fields` that both objects have with different values.
void compare(const fs::path& folder, const Json& stored, const Json& here,
             std::span<const Field> fields) {
  for (const Field& field : fields) {
    const Json* const before = stored.find(field.name);
    const Json* const now = here.find(field.name);
    if (before == nullptr || now == nullptr || before->compact() == now->compact()) continue;
    refuse_checkpoint(folder, fmt::format("was written with {} {}, but the config has {}; give the "
                                          "same value",
                                          field.key, shown(*before), shown(*now)));
  }
}

/// Parses a sentence from its beginning.
class Sentence {
 public:
  explicit Sentence(std::string_view rest) : rest_(rest) {}

  bool skip(std::string_view words) {
    if (!rest_.starts_with(words)) return false;
    rest_.remove_prefix(words.size());
    return true;
  }
  template <class Number>
  bool read(Number& number) {
    const auto [end, error] = std::from_chars(rest_.data(), rest_.data() + rest_.size(), number);
    if (error != std::errc()) return false;
    rest_.remove_prefix(static_cast<std::size_t>(end - rest_.data()));
    return true;
  }
  /// Returns the rest, split at commas.
  [[nodiscard]] std::vector<std::string> words() const {
    constexpr std::string_view kBetween = ", ";
    std::vector<std::string> found;
    std::string_view rest = rest_;
    for (auto end = rest.find(kBetween); end != std::string_view::npos; end = rest.find(kBetween)) {
      found.emplace_back(rest.substr(0, end));
      rest.remove_prefix(end + kBetween.size());
    }
    found.emplace_back(rest);
    return found;
  }

 private:
  std::string_view rest_;
};

/// Parses "rank R, alpha A[ (rsLoRA)][ (DoRA)], for T, ..."; null for other sentences.
Json parse_adapters(std::string_view text) {
  Sentence sentence(text);
  model::AdapterConfig adapters;
  if (!sentence.skip("rank ") || !sentence.read(adapters.rank)) return {};
  if (!sentence.skip(", alpha ") || !sentence.read(adapters.alpha)) return {};
  adapters.rslora = sentence.skip(" (rsLoRA)");
  adapters.dora = sentence.skip(" (DoRA)");
  if (!sentence.skip(", for ")) return {};
  adapters.targets = sentence.words();
  Json fields = identity_of(adapters);
  fields.erase("dropout");  // not part of the sentence
  fields.erase("modules_to_save");
  return fields;
}

}  // namespace

Json identity_of(const std::optional<model::AdapterConfig>& adapters) {
  if (!adapters) return {};
  return Json::object({{"rank", adapters->rank},
                       {"alpha", adapters->alpha},
                       {"dropout", adapters->dropout},
                       {"rank_pattern", rows_of(adapters->rank_pattern)},
                       {"alpha_pattern", rows_of(adapters->alpha_pattern)},
                       {"rslora", adapters->rslora},
                       {"dora", adapters->dora},
                       {"targets", sorted_list(adapters->targets)},
                       {"modules_to_save", sorted_list(adapters->modules_to_save)}});
}

Json identity_of(const std::optional<model::Quantization>& base) {
  if (!base) return {};
  const bool nf4 = base->format == model::Quantization::Format::nf4;
  Json fields = Json::object({{"format", nf4 ? "nf4" : "int8"},
                              {"block", base->block()},
                              {"double_quantization", base->double_scales}});
  if (base->double_scales) fields["nested_block"] = model::kNestedBlock;
  return fields;
}

Json read_adapters(const Json* stored, const fs::path& path) {
  if (stored == nullptr) return {};
  if (stored->is_object()) return *stored;
  Json fields = parse_adapters(stored->is_string() ? stored->text() : "");
  if (fields.is_null()) refuse_checkpoint(path, "its adapters are malformed");
  return fields;
}

Json read_quantization(const Json* stored, const fs::path& path) {
  using Format = model::Quantization::Format;
  if (stored == nullptr) return {};
  if (stored->is_object()) return *stored;
  if (*stored == "int8") return identity_of(model::Quantization{Format::int8});
  if (*stored == "nf4") return identity_of(model::Quantization{Format::nf4});
  if (*stored == "nf4 with scales in 8 bits") {
    return identity_of(model::Quantization{Format::nf4, true});
  }
  refuse_checkpoint(path, "its quantised base is malformed");
}

void check_adapters(const fs::path& folder, const Json& stored,
                    const std::optional<model::AdapterConfig>& here) {
  if (stored.is_null() != !here) {
    refuse_checkpoint(folder, here ? "was written without adapters, but the config has "
                                     "ballast.adapters; leave it out"
                                   : "was written with adapters, but the config has none; give the "
                                     "same ballast.adapters");
  }
  Json before = stored;
  for (const char* const key : {"rank_pattern", "alpha_pattern"}) {  // earlier checkpoints
    if (!before.is_null() && before.find(key) == nullptr) before[key] = Json::array();
  }
  compare(folder, before, identity_of(here), kAdapterFields);
}

void check_quantization(const fs::path& folder, const Json& stored,
                        const std::optional<model::Quantization>& here) {
  const auto or_none = [](const Json& fields) {
    return fields.is_null() ? Json::object({{"format", "none"}}) : fields;
  };
  compare(folder, or_none(stored), or_none(identity_of(here)), kBaseFields);
}

}  // namespace ballast::checkpoint
