#include <random>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "ballast/text/json.h"

#include "tests/support/fuzz_inputs.h"
#include "tests/unit/config/samples.h"

namespace ballast::config::mutation_test {
namespace {

using test::kMinimal;
using test::parse_text;
using test::samples;
using Random = std::mt19937_64;

std::size_t below(Random& random, std::size_t bound) {
  return random() % bound;
}

/// Values at the limits of every type in a config.
constexpr std::string_view kEdges =
    "null true false 0 -0.0 -1 1 2.5 1e308 1e999 -1e999 5e-324 9007199254740993 "
    "18446744073709551615 99999999999999999999 \"\" \"auto\" \"1GiB\" \"1e30GiB\" "
    "\"0-18446744073709551615\" \"\\u0000\" \"\\ud800\" [] {} [[]] [null] {\"enabled\":true} "
    "{\"\":0}";

const std::vector<std::string_view>& edge_values() {
  static const auto values = text::words_of(kEdges);
  return values;
}

std::string mutate_bytes(std::string text, Random& random) {
  for (std::size_t edits = 1 + below(random, 2); edits > 0 && !text.empty(); --edits) {
    const std::size_t at = below(random, text.size());
    switch (below(random, 5)) {
      case 0:
        text[at] = static_cast<char>(random());
        break;
      case 1:
        text.erase(at, 1 + below(random, 20));
        break;
      case 2:
        text.insert(at, text, below(random, text.size()), 1 + below(random, 20));
        break;
      case 3:
        text.insert(at, edge_values()[below(random, edge_values().size())]);
        break;
      default:
        text.insert(at, 1, "{}[],:\"/*-+eE.019 \n"[below(random, 19)]);
    }
  }
  return text;
}

/// A random node of the tree below `json`, never `json` itself unless it has no members.
nlohmann::json& random_node(nlohmann::json& json, Random& random) {
  auto* node = &json;
  while (node->is_structured() && !node->empty() && (node == &json || below(random, 4) != 0)) {
    auto member = node->begin();
    std::advance(member, static_cast<std::ptrdiff_t>(below(random, node->size())));
    node = &*member;
  }
  return *node;
}

std::string mutate_tree(const std::string& text, Random& random) {
  auto json = nlohmann::json::parse(text, nullptr, true, true);
  std::string marker = "@marker@";
  random_node(json, random) = marker;
  std::string out = json.dump();
  const std::string quoted = "\"" + marker + "\"";
  return out.replace(out.find(quoted), quoted.size(),
                     edge_values()[below(random, edge_values().size())]);
}

/// Any text must be a config that prints and reads back, or give one line of error. Returns whether
/// it was a config.
bool check(const std::string& text, const std::vector<std::string>& overrides) {
  try {
    const std::string printed = print(parse_text(text, overrides));
    EXPECT_EQ(print(parse_text(printed)), printed) << text;
    return true;
  } catch (const Error& error) {
    const std::string message = error.what();
    EXPECT_EQ(error.category(), ErrorCategory::config) << message;
    EXPECT_EQ(message.rfind("c.json", 0), 0U) << message;
    EXPECT_EQ(message.find_first_of("\n\r\t"), std::string::npos) << message;
    EXPECT_LT(message.size(), 1200U) << message;
    return false;
  }
}

const std::size_t kTexts = test::fuzz_inputs(6000);

TEST(ConfigMutation, OfBytesGivesAConfigOrOneLine) {
  Random random(1);
  const auto texts = samples();
  std::size_t configs = 0;
  for (std::size_t i = 0; i < kTexts; ++i) {
    configs += check(mutate_bytes(texts[below(random, texts.size())], random), {}) ? 1 : 0;
    if (HasFailure()) return;
  }
  EXPECT_GT(configs, kTexts / 60);  // otherwise the mutations do not reach the later checks
}

TEST(ConfigMutation, OfValuesGivesAConfigOrOneLine) {
  Random random(2);
  auto texts = samples();
  for (const auto& text : samples()) texts.push_back(print(parse_text(text)));
  std::size_t configs = 0;
  for (std::size_t i = 0; i < kTexts; ++i) {
    configs += check(mutate_tree(texts[below(random, texts.size())], random), {}) ? 1 : 0;
    if (HasFailure()) return;
  }
  EXPECT_GT(configs, kTexts / 60);
}

TEST(ConfigMutation, OfOverridesGivesAConfigOrOneLine) {
  Random random(3);
  const std::vector<std::string> seeds = {"optimizer.params.lr=1e-3",
                                          "ballast.placement=[]",
                                          "zero_optimization.offload_param.device=nvme",
                                          "data.text=[\"a\", \"b\"]",
                                          "model.weights=x",
                                          "aio.paths=[{\"path\": \"a\"}]"};
  std::size_t configs = 0;
  for (std::size_t i = 0; i < kTexts / 2; ++i) {
    configs += check(kMinimal, {mutate_bytes(seeds[below(random, seeds.size())], random)}) ? 1 : 0;
    if (HasFailure()) return;
  }
  EXPECT_GT(configs, kTexts / 60);
}

}  // namespace
}  // namespace ballast::config::mutation_test
