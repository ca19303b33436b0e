// Compares the operations of all passes of small models with those of the commit that wrote
// tests/data/layer_calls.txt, by one hash per model and form. A change of the code that must not
// change what is computed, or where, leaves all of them as they are.

#include <algorithm>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "ballast/model/family.h"

#include "tests/support/fixtures.h"
#include "tests/unit/model/golden_table.h"
#include "tests/unit/model/net_models.h"
#include "tests/unit/model/recorded_calls.h"

namespace ballast::model_net {
namespace {

GoldenRow row_of_calls(const RecordedModel& model) {
  GoldenRow row = {model.name, {}};
  for (const CallList& list : record_calls(model)) {
    std::string& text = row.texts.emplace_back();
    for (const std::string& line : list.lines) text += line + "\n";
  }
  return row;
}

std::vector<GoldenRow> rows_of_calls() {
  std::vector<GoldenRow> rows;
  for (const RecordedModel& model : recorded_models()) {
    rows.push_back(row_of_calls(model));
  }
  return rows;
}

/// The forms that full lists have.
bool is_listed(std::string_view form) {
  return form == "sizes" || form == "layer" || form == "backward" || form == "tile" ||
         form == "tile_backward";
}

/// A choice of a variation, as text.
std::vector<std::string> choices_of(const Variation& v) {
  const auto flag = [](const char* name, bool on) {
    return (on ? "" : "not ") + std::string(name);
  };
  return {std::string(v.training),  std::string(v.ranks),      flag("cut", v.cuts),
          flag("joined", v.joins),  flag("in tiles", v.tiles), flag("bf16", v.bf16),
          flag("packed", v.packed), flag("later", v.later),    flag("wide", v.wide)};
}

/// Returns whether two choices exclude each other, or occur in the variations with few others.
bool is_left_out(const std::string& a, const std::string& b) {
  static const std::set<std::string> kRare = {"tensor", "experts", "nf4", "norms"};
  const auto are = [&](auto one, auto other) {
    return (one(a) && other(b)) || (one(b) && other(a));
  };
  const auto is = [](std::string_view name) {
    return [name](const std::string& choice) { return choice == name; };
  };
  const auto rare = [](const std::string& choice) { return kRare.contains(choice); };
  const auto any = [](const std::string& /*choice*/) { return true; };
  const auto tiled = is("in tiles");
  const auto adapted = [](const std::string& choice) {
    return choice == "lora" || choice == "dropout" || choice == "dora" || choice == "pairs";
  };
  const auto shared = [](const std::string& choice) {
    return choice == "parts" || choice == "part of one";
  };
  return are(rare, any) || are(tiled, adapted) || are(tiled, shared) ||
         are(is("pairs"), is("part of one")) || are(is("pairs"), is("packed"));
}

TEST(RecordedVariations, CoverPairsOfChoices) {
  std::set<std::pair<std::string, std::string>> covered;
  std::vector<std::set<std::string>> choices(choices_of(variations().front()).size());
  for (const Variation& variation : variations()) {
    const std::vector<std::string> own = choices_of(variation);
    for (std::size_t i = 0; i < own.size(); ++i) {
      choices[i].insert(own[i]);
      for (std::size_t j = 0; j < i; ++j) covered.emplace(own[j], own[i]);
    }
  }
  for (std::size_t i = 0; i < choices.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      for (const std::string& a : choices[j]) {
        for (const std::string& b : choices[i]) {
          EXPECT_TRUE(covered.contains({a, b}) || is_left_out(a, b)) << a << " with " << b;
        }
      }
    }
  }
}

TEST(RecordedModels, AreOfAllFamilies) {
  std::set<std::string> families;
  for (const SmallModel& model : small_models()) {
    const auto made = configure(model);
    ASSERT_TRUE(made.has_value()) << model.name;
    families.insert(made->config.model.family);
  }
  for (const std::string& family : model::family_names()) {
    EXPECT_TRUE(families.contains(family))
        << family << " has no model in tests/data/families, so its calls are not recorded";
  }
}

TEST(LayerCalls, AreThoseOfTheFile) {
  compare_with_file(layer_calls());
}

TEST(LayerCalls, AreThoseOfTheFullLists) {
  const std::vector<std::string> wanted = full_lists();
  std::size_t found = 0;
  for (const RecordedModel& model : recorded_models()) {
    if (std::ranges::find(wanted, model.name) == wanted.end()) continue;
    ++found;
    const std::string path = path_of_full_list(model.name);
    std::ostringstream golden;
    golden << std::ifstream(test::fixture(path)).rdbuf();
    const std::string text = full_list(row_of_calls(model));
    std::istringstream before(golden.str());
    std::istringstream now(text);
    std::size_t number = 0;
    std::string expected;
    std::string line;
    for (bool same = true; same && std::getline(now, line);) {
      ++number;
      same = static_cast<bool>(std::getline(before, expected)) && line == expected;
      EXPECT_TRUE(same) << path << ", line " << number << " was\n  " << expected << "\nnow\n  "
                        << line << "\nAfter an intended change: unit_model_net --write";
    }
    EXPECT_EQ(golden.str().size(), text.size()) << path;
  }
  EXPECT_EQ(found, wanted.size());
}

}  // namespace

const GoldenTable& layer_calls() {
  static const GoldenTable kTable = {"layer_calls.txt", form_names(), &rows_of_calls};
  return kTable;
}

std::vector<std::string> full_lists() {
  return {"llama/plain",          "gemma2/plain",  "gemma4_layer_inputs/plain",
          "gemma4_experts/plain", "qwen3_5/plain", "deepseek_v3/plain",
          "gpt_neox/plain",       "qwen3/tiles",   "mixtral/plain",
          "qwen2/lora",           "olmo2/dora",    "gemma3/parts"};
}

std::string path_of_full_list(const std::string& name) {
  std::string file = name;
  std::ranges::replace(file, '/', '-');
  return fmt::format("layer_calls/{}.txt", file);
}

std::string full_list(const GoldenRow& row) {
  std::string text;
  for (std::size_t form = 0; form < form_names().size(); ++form) {
    if (is_listed(form_names()[form])) text += row.texts[form];
  }
  return text;
}

}  // namespace ballast::model_net
