#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "ballast/config/config.h"
#include "ballast/core/error.h"
#include "ballast/model/family.h"
#include "ballast/setup/translate.h"
#include "ballast/text/json.h"

#include "tests/support/fixtures.h"
#include "tests/unit/config/samples.h"
#include "tools/usage/manual.h"

namespace ballast::tools::config_ranges_test {
namespace {

// 64 bits of mantissa hold every whole number of a config.
using Number = long double;

struct End {
  Number value = 0;
  bool open = false;  ///< the end itself is refused
};

/// The numbers that a row of configs/keys.md says the key accepts.
struct Range {
  std::optional<End> low;
  std::optional<End> high;
};

/// Matches "2^64 - 1", "4 KiB", "1e-4".
const std::string kNumber = R"((-?[0-9.]+(?:e-?[0-9]+)?(?:\^[0-9]+)?(?: - 1)?(?: [KMGT]iB)?))";

Number number_of(const std::string& text) {
  static const std::regex form(
      R"((-?[0-9.]+(?:e-?[0-9]+)?)(?:\^([0-9]+))?( - 1)?(?: ([KMGT])iB)?)");
  std::smatch parts;
  EXPECT_TRUE(std::regex_match(text, parts, form)) << text;
  Number value = std::strtold(parts[1].str().c_str(), nullptr);
  if (parts[2].matched) value = std::pow(value, std::strtold(parts[2].str().c_str(), nullptr));
  if (parts[3].matched) value -= 1;
  if (parts[4].matched) {
    value *= std::pow(Number{1024}, 1 + std::string("KMGT").find(parts[4].str()));
  }
  return value;
}

/// Nothing if the row names no numbers, or only those of other keys.
std::optional<Range> range_of(const std::string& text) {
  static const std::regex between("^" + kNumber + R"((?: \([^)]*\))? to (below )?)" + kNumber);
  static const std::regex from("^" + kNumber + " to `?[a-z]");
  static const std::regex least("^(?:each )?(at least|above) " + kNumber + "(?:, (at most|below) " +
                                kNumber + ")?");
  static const std::regex most("^at most " + kNumber);
  std::smatch parts;
  if (std::regex_search(text, parts, between)) {
    return Range{End{number_of(parts[1])}, End{number_of(parts[3]), parts[2].matched}};
  }
  if (std::regex_search(text, parts, from)) return Range{End{number_of(parts[1])}, std::nullopt};
  if (std::regex_search(text, parts, least)) {
    Range range = {End{number_of(parts[2]), parts[1] == "above"}, std::nullopt};
    if (parts[3].matched) range.high = End{number_of(parts[4]), parts[3] == "below"};
    return range;
  }
  if (std::regex_search(text, parts, most)) return Range{std::nullopt, End{number_of(parts[1])}};
  return std::nullopt;
}

/// Configs in which every key of a family, an optimizer or a schedule has an effect in at least
/// one.
std::vector<std::string> bases() {
  std::vector<std::string> all = test::samples();
  for (
      const char* more :
      {R"("ballast": {"train": "adapters", "adapters": {"targets": "all-linear"}, "spike": {"action": "warn"}})",
       R"("optimizer": {"type": "SGD"})", R"("optimizer": {"type": "Lion"})",
       R"("scheduler": {"type": "WarmupLR"})",
       R"("scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 100}})",
       R"("scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 100}})"}) {
    all.push_back(test::with(more));
  }
  for (const auto& entry : std::filesystem::directory_iterator(test::fixture("families"))) {
    if (entry.path().extension() != ".json") continue;
    std::ifstream file(entry.path());
    const std::string text((std::istreambuf_iterator<char>(file)), {});
    const text::Json family = text::parse_json(text, entry.path().string());
    if (family.find("model") == nullptr) continue;
    text::Json config = text::parse_json(
        R"({"data": {"tokens": "a.bin", "sequence_length": 8}, "train_batch_size": 8})", "data");
    config["model"] = *family.find("model");
    config["model"].erase("no_rope_layers");  // the list has precedence over the interval
    all.push_back(config.compact());
  }
  return all;
}

/// Returns the complaint about setting `path` to `value`, "" for none or one about another key.
std::string refusal(const std::string& base, const std::string& path, const std::string& value) {
  std::string message;
  try {
    static_cast<void>(setup::model_of(test::parse_text(base, {path + "=" + value})));
  } catch (const Error& error) {
    message = error.what();
  }
  const std::size_t at = message.find(path);
  const bool own = at == 0 || message.starts_with("c.json: " + path);
  return own ? message.substr(at) : "";
}

/// Whether the value is out of range, rather than at odds with other keys.
bool is_out_of_range(const std::string& refusal) {
  return refusal.find(": must be ") != std::string::npos ||
         refusal.find(" does not fit ") != std::string::npos ||
         refusal.find(": expected ") != std::string::npos;
}

/// The value as JSON. `each`: for a pair of numbers.
std::string form(Number value, bool each) {
  const bool whole = value == std::floor(value) && std::abs(value) < 1e20L;
  const std::string text = whole ? fmt::format("{:.0f}", value) : fmt::format("{:.17g}", value);
  return each ? fmt::format("[{}, 0.5]", text) : text;
}

struct Probe {
  std::string value;
  bool accepted = false;
};

/// The values just inside and outside of a range.
std::vector<Probe> probes_of(const Range& range, bool each) {
  std::vector<Probe> probes;
  const auto add = [&](Number value, bool accepted) {
    probes.push_back({form(value, each), accepted});
  };
  const auto add_end = [&](const End& end, Number outwards) {
    const Number near = end.value + outwards * 1e-6L;
    add(end.open ? end.value - outwards * 1e-9L : end.value, true);
    add(end.open ? end.value : end.value + outwards, false);
    if (form(near, each) != form(end.value, each) && std::abs(end.value) < 1e6L) add(near, false);
  };
  if (range.low) add_end(*range.low, -1);
  if (range.high) {
    add_end(*range.high, 1);
    probes.push_back({form(range.high->value + 0x1p53L, each), false});
  }
  return probes;
}

struct Comparison {
  std::size_t equal = 0;   ///< number of probes before the first difference
  std::string difference;  ///< "" if there is none
};

Comparison compare(const std::string& base, const std::string& path,
                   const std::vector<Probe>& probes) {
  Comparison found;
  for (const Probe& probe : probes) {
    const std::string why = refusal(base, path, probe.value);
    if (why.find("unknown key") != std::string::npos) return found;
    if (probe.accepted && is_out_of_range(why)) found.difference = why;
    if (!probe.accepted && why.empty()) found.difference = probe.value + " is accepted";
    if (!found.difference.empty()) return found;
    ++found.equal;
  }
  return found;
}

std::vector<Probe> probes_of(const KeyPage& row) {
  const std::string range(row.range);
  if (range == "true, false") return {{"true", true}, {"false", true}, {"1", false}};
  const auto claim = range_of(range);
  return claim ? probes_of(*claim, range.starts_with("each")) : std::vector<Probe>();
}

TEST(ConfigRanges, OfTheTablesAreThoseOfTheProgram) {
  const std::vector<std::string> all = bases();
  int compared = 0;
  for (const KeyPage& row : key_pages()) {
    const std::string path(row.path);
    const std::vector<Probe> probes = probes_of(row);
    if (probes.empty()) continue;
    // In some configs the key has no effect, so one with all ends of the range is enough.
    Comparison best;
    for (const std::string& base : all) {
      Comparison here = compare(base, path, probes);
      if (here.equal > best.equal || best.equal == 0) best = std::move(here);
      if (best.equal == probes.size()) break;
    }
    EXPECT_EQ(best.equal, probes.size()) << path << ": " << row.range << ": " << best.difference;
    ++compared;
  }
  EXPECT_GT(compared, 140);
}

/// A config of `family` that leaves out what has a default.
std::string config_of(const std::string& family) {
  text::Json config = text::parse_json(
      R"({"model": {"hidden_size": 64, "num_layers": 4, "num_heads": 4, "num_kv_heads": 4},
          "data": {"tokens": "a.bin", "sequence_length": 8}, "train_batch_size": 8})",
      "config");
  config["model"]["family"] = family;
  for (const model::DetailKey& key : model::family(family).details()) {
    const bool counts = key.name == "num_experts" || key.name == "num_local_experts" ||
                        key.name == "n_routed_experts" ||
                        (key.name == "q_lora_rank" && key.standard.is_null());
    if (counts) config["model"][key.name] = 16;
  }
  return config.compact();
}

/// The default of a row for one of `names`: "16; gpt_oss, mistral4: 4; others: 8". "" if the row
/// does not have it as a number, true or false.
std::string initial_for(const std::string& text, const std::vector<std::string>& names) {
  static const std::regex plain(R"(true|false|[0-9.]+(e-?[0-9]+)?)");
  std::string general;
  std::stringstream parts(text);
  for (std::string part; std::getline(parts, part, ';');) {
    const std::size_t colon = part.rfind(": ");
    std::string value = part.substr(colon == std::string::npos ? 0 : colon + 2);
    value.erase(0, value.find_first_not_of(' '));
    if (!std::regex_match(value, plain)) value.clear();
    const std::string owners =
        colon == std::string::npos ? "" : ", " + part.substr(part.find_first_not_of(' '), colon);
    const auto is_named = [&](const std::string& name) {
      return std::regex_search(owners, std::regex(", " + name + "(,|:|$)"));
    };
    if (std::ranges::any_of(names, is_named)) return value;
    if (owners.empty() || is_named("others") || is_named("other " + names.back())) general = value;
  }
  return general;
}

TEST(ConfigRanges, DefaultsOfTheTablesAreThoseOfEveryFamily) {
  int compared = 0;
  for (const std::string& family : model::family_names()) {
    const text::Json printed =
        text::parse_json(config::print(test::parse_text(config_of(family))), "printed");
    const text::Json& model = *printed.find("model");
    std::vector<std::string> names = {family};
    if (model.find("kv_lora_rank") != nullptr) names.emplace_back("latent attention");
    for (const KeyPage& row : key_pages()) {
      if (!row.path.starts_with("model.")) continue;
      const text::Json* const value = model.find(row.path.substr(6));
      const std::string initial = initial_for(std::string(row.initial), names);
      if (value == nullptr || value->is_null() || initial.empty()) continue;
      const bool equal =
          value->is_number() ? value->number() == std::stod(initial) : value->compact() == initial;
      EXPECT_TRUE(equal) << family << ": " << row.path << " is " << value->compact() << ", not "
                         << initial;
      ++compared;
    }
  }
  EXPECT_GT(compared, 300);
}

}  // namespace
}  // namespace ballast::tools::config_ranges_test
