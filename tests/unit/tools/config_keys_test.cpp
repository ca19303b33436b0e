#include "tools/usage/config_keys.h"

#include <algorithm>
#include <cctype>
#include <string>
#include <string_view>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/config/config.h"
#include "ballast/config/key_list.h"
#include "ballast/core/error.h"
#include "ballast/text/json.h"

#include "tests/unit/config/samples.h"

namespace ballast::tools::config_keys_test {
namespace {

const KeyText* row_of(std::string_view path) {
  const auto rows = key_texts();
  const auto found = std::ranges::find(rows, path, &KeyText::path);
  return found == rows.end() ? nullptr : &*found;
}

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

TEST(ConfigKeys, OfTheTablesAndOfTheProgramAreTheSame) {
  const std::vector<config::KeyInfo> keys = config::key_list();
  for (const config::KeyInfo& key : keys) {
    EXPECT_NE(row_of(key.path), nullptr) << "configs/README.md lacks " << key.path;
  }
  for (const KeyText& row : key_texts()) {
    const std::string section = std::string(row.path) + ".";
    const bool exists = std::ranges::any_of(keys, [&](const config::KeyInfo& key) {
      return key.path == row.path || key.path.starts_with(section);
    });
    EXPECT_TRUE(exists) << row.path << " of configs/README.md is not a key";
    EXPECT_FALSE(row.meaning.empty()) << row.path;
  }
}

TEST(ConfigKeys, TablesListAllAcceptedValues) {
  for (const config::KeyInfo& key : config::key_list()) {
    const KeyText* const row = row_of(key.path);
    if (row == nullptr) continue;
    const std::string text = lower(std::string(row->meaning) + " " + std::string(row->range));
    for (const std::string& value : key.values) {
      EXPECT_NE(text.find(lower(value)), std::string::npos) << key.path << ": " << value;
    }
  }
}

TEST(ConfigKeys, TablesHaveTheDefaultsThatAConfigPrints) {
  const config::Config config = test::parse_text(test::kMinimal);
  const text::Json printed = text::parse_json(config::print(config), "printed");
  int compared = 0;
  for (const KeyText& row : key_texts()) {
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
            "    Nesterov's momentum (SGD); needs momentum\n"
            "    default: false\n"
            "    range: true, false\n");
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
