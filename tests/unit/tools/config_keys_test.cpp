#include <algorithm>
#include <cctype>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "ballast/config/config.h"
#include "ballast/config/key_effects.h"
#include "ballast/core/error.h"
#include "ballast/text/json.h"

#include "tests/unit/config/samples.h"
#include "tools/usage/manual.h"

namespace ballast::tools::config_keys_test {
namespace {

std::string lower(std::string_view text) {
  std::string all(text);
  for (char& c : all) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return all;
}

/// The value at `path`; null if there is none.
const text::Json* find(const text::Json& root, std::string_view path) {
  const text::Json* at = &root;
  while (at != nullptr && !path.empty()) {
    const std::size_t dot = std::min(path.find('.'), path.size());
    at = at->is_object() ? at->find(path.substr(0, dot)) : nullptr;
    path.remove_prefix(std::min(dot + 1, path.size()));
  }
  return at;
}

/// The tables stand between `<!-- keys: SECTIONS -->`, which names their sections, and
/// `<!-- end -->`.
TEST(ConfigKeys, OfTheManualAreThoseOfTheProgram) {
  std::ifstream file(std::filesystem::path(BALLAST_CONFIGS) / "keys.md");
  std::set<std::string> shown;
  std::string expected;
  std::string found;
  bool inside = false;
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("<!-- keys: ")) {
      std::vector<std::string> sections;
      for (const std::string_view word : text::words_of(line)) {
        if (word != "<!--" && word != "keys:" && word != "-->") sections.emplace_back(word);
      }
      shown.insert(sections.begin(), sections.end());
      expected =
          "| key | meaning | default | range |\n| --- | --- | --- | --- |\n" + key_table(sections);
      found.clear();
      inside = true;
    } else if (line == "<!-- end -->") {
      EXPECT_TRUE(found == expected) << "run tools/dev/write_key_tables.py BUILD/tools/ballast";
      inside = false;
    } else if (inside) {
      found += line + "\n";
    }
  }
  for (const KeyPage& key : key_pages()) {
    const std::size_t dot = key.path.find('.');
    const std::string section = dot == std::string::npos ? "top" : key.path.substr(0, dot);
    EXPECT_TRUE(shown.contains(section)) << "configs/keys.md has no table with " << key.path;
  }
}

TEST(ConfigKeys, HaveATextWithAllAcceptedValues) {
  for (const config::KeyInfo& key : config::key_list()) {
    const std::string text = lower(fmt::format("{} {}", key.text.meaning, key.text.range));
    EXPECT_FALSE(key.text.meaning.empty()) << key.path;
    for (const std::string& value : key.values) {
      EXPECT_NE(text.find(lower(value)), std::string::npos) << key.path << ": " << value;
    }
  }
}

TEST(ConfigKeys, TablesHaveTheDefaultsThatAConfigPrints) {
  const config::Config config = test::parse_text(test::kMinimal);
  const text::Json printed = text::parse_json(config::print(config), "printed");
  int compared = 0;
  for (const KeyPage& row : key_pages()) {
    const text::Json* const value = find(printed, row.path);
    if (value == nullptr || row.initial.empty()) continue;
    const std::string initial(row.initial);
    if (initial == "true" || initial == "false") {
      EXPECT_EQ(value->compact(), initial) << row.path;
    } else if (initial.find_first_not_of("0123456789.e-") == std::string::npos) {
      ASSERT_TRUE(value->is_number()) << row.path << ": " << value->compact();
      EXPECT_EQ(value->number(), std::stod(initial)) << row.path;
    } else {
      continue;
    }
    ++compared;
  }
  EXPECT_GT(compared, 45);
}

TEST(ConfigKeys, ArePrintedWithMeaningDefaultAndRange) {
  EXPECT_EQ(config_keys_page({"nesterov"}, 80),
            "optimizer.params.nesterov\n"
            "    Nesterov's momentum, which needs a momentum above 0 (SGD)\n"
            "    default: false\n"
            "    range: true, false\n");
  EXPECT_EQ(config_keys_page({"weight_decay"}, 80).find('`'), std::string::npos);
}

TEST(ConfigKeys, AreFoundByNameAndElseByMeaning) {
  const std::string by_name = config_keys_page({"WARMUP", "lr"}, 80);
  EXPECT_NE(by_name.find("warmup_min_lr\n"), std::string::npos);
  EXPECT_NE(by_name.find("\n\nscheduler.params.warmup_max_lr\n"), std::string::npos);
  EXPECT_EQ(by_name.find("\noptimizer.params.lr\n"), std::string::npos);
  EXPECT_NE(config_keys_page({"rslora)"}, 80).find("ballast.adapters.rslora\n"), std::string::npos);
}

TEST(ConfigKeys, OfAnUnknownWordAreRefusedWithTheNearest) {
  try {
    config_keys_page({"gradient_cliping"}, 80);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), ErrorCategory::usage);
    EXPECT_NE(std::string(error.what()).find("did you mean 'gradient_clipping'?"),
              std::string::npos);
  }
}

}  // namespace
}  // namespace ballast::tools::config_keys_test
