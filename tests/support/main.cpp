#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <iostream>
#include <string>
#include <string_view>
#include <vector>

#include <gtest/gtest.h>

#include "tests/support/tags.h"

namespace {

struct TaggedPattern {
  std::string_view tag;
  std::string_view pattern;
};

std::vector<TaggedPattern>& tagged_patterns() {
  static std::vector<TaggedPattern> patterns;
  return patterns;
}

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find(separator, begin), text.size());
    if (end > begin) parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

/// GoogleTest's patterns: '*' stands for any text, '?' for a character.
bool matches(std::string_view pattern, std::string_view name) {
  if (pattern.empty()) return name.empty();
  if (pattern.front() == '*') {
    return matches(pattern.substr(1), name) || (!name.empty() && matches(pattern, name.substr(1)));
  }
  return !name.empty() && (pattern.front() == '?' || pattern.front() == name.front()) &&
         matches(pattern.substr(1), name.substr(1));
}

bool matches_a_test(std::string_view pattern) {
  const auto& unit = *testing::UnitTest::GetInstance();
  for (int i = 0; i < unit.total_test_suite_count(); ++i) {
    const testing::TestSuite& suite = *unit.GetTestSuite(i);
    for (int j = 0; j < suite.total_test_count(); ++j) {
      const std::string name = std::string(suite.name()) + "." + suite.GetTestInfo(j)->name();
      if (matches(pattern, name)) return true;
    }
  }
  return false;
}

/// The patterns of tags, each followed by ':'.
std::string patterns_of(std::string_view tags) {
  std::string patterns;
  for (const std::string_view tag : split(tags, ',')) {
    for (const TaggedPattern& tagged : tagged_patterns()) {
      if (tagged.tag == tag) patterns.append(tagged.pattern).append(":");
    }
  }
  return patterns;
}

/// Restricts the tests that run. Returns false if a tag is wrong.
bool choose_by_tags(std::string_view wanted, std::string_view unwanted) {
  for (const TaggedPattern& tagged : tagged_patterns()) {
    if (matches_a_test(tagged.pattern)) continue;
    std::cerr << "no test matches " << tagged.pattern << ", which has the tag " << tagged.tag
              << "\n";
    return false;
  }
  std::string& filter = testing::GTEST_FLAG(filter);
  if (!wanted.empty()) {
    filter = patterns_of(wanted);
    if (filter.empty()) std::cerr << "no test has the tag " << wanted << "\n";
    if (filter.empty()) return false;
  }
  const std::string left_out = patterns_of(unwanted);
  if (!left_out.empty()) {
    filter.append(filter.find('-') == std::string::npos ? "-" : ":").append(left_out);
  }
  return true;
}

}  // namespace

ballast::test::Tag::Tag(std::string_view tags, std::string_view patterns) {
  for (const std::string_view tag : split(tags, ',')) {
    for (const std::string_view pattern : split(patterns, ':'))
      tagged_patterns().push_back({tag, pattern});
  }
}

/// Runs the tests that the tags choose. Exits with 77, which Meson shows as SKIP, if every selected
/// test skipped itself or an environment skipped them all.
int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  std::string tagged;
  const char* set = std::getenv("BALLAST_TEST_UNTAGGED");
  std::string untagged = set == nullptr ? "" : set;
  for (int i = 1; i < argc; ++i) {
    const std::string_view word = argv[i];
    if (word.starts_with("--tagged=")) tagged = word.substr(9);
    if (word.starts_with("--untagged=")) untagged.append(",").append(word.substr(11));
  }
  if (!choose_by_tags(tagged, untagged)) return 1;
  const int status = RUN_ALL_TESTS();
  const auto& unit = *testing::UnitTest::GetInstance();
  if (testing::GTEST_FLAG(list_tests)) return status;
  const bool all_skipped =
      unit.test_to_run_count() > 0 && (unit.skipped_test_count() == unit.test_to_run_count() ||
                                       unit.ad_hoc_test_result().Skipped());
  return status == 0 && all_skipped ? 77 : status;
}
