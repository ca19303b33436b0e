#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/core/error.h"
#include "ballast/text/files.h"
#include "ballast/text/json.h"

#include "src/model/description/families/families.h"
#include "tests/support/fixtures.h"

namespace ballast::model::rotary_test {
namespace {

[[noreturn]] void refuse(std::string_view key, const std::string& rule) {
  throw Error(ErrorCategory::config, std::string(key) + ": " + rule);
}

ModelConfig config_of(const std::string& scaling, std::uint64_t head_dim = 64) {
  ModelConfig c;
  c.head_dim = head_dim;
  c.details = {{"rope_theta", 10000.0}, {"rope_scaling", text::parse_json(scaling, "scaling")}};
  return c;
}

/// Compares with tests/data/make_family_fixtures.py, which computes them in fp32.
TEST(Rotary, FrequenciesAreThoseOfTransformers) {
  const auto path = test::fixture("families/rotary.json");
  const text::Json cases = text::parse_json(text::read_settings(path, "fixture"), "rotary.json");
  ASSERT_EQ(cases.members().size(), 7U);
  for (const auto& [name, expected, at] : cases.members()) {
    SCOPED_TRACE(name);
    ModelConfig c =
        config_of(expected.find("rope_scaling")->compact(), *expected.find("head_dim")->whole());
    const Rotary rotary = rotary_positions(c, refuse);
    const auto found = frequencies_in_document(rotary, *expected.find("length")->whole());
    const auto& theirs = expected.find("frequencies")->elements();
    ASSERT_EQ(found.size(), theirs.size());
    for (std::size_t i = 0; i < theirs.size(); ++i) {
      EXPECT_NEAR(found[i], theirs[i].number(), 2e-6 * theirs[i].number()) << i;
    }
    EXPECT_NEAR(rotary.factor, expected.find("factor")->number(), 1e-12);
  }
}

TEST(Rotary, LengthsOfDocumentsAreThoseOfTheirRows) {
  constexpr std::size_t kLength = 9;
  const std::vector<std::int32_t> positions = {0, 1, 2, 3, 0, 0, 1, 0, 0,  //
                                               0, 1, 2, 3, 4, 5, 6, 7, 8};
  const std::vector<std::size_t> expected = {4, 4, 4, 4, 1, 2, 2, 1, 1,  //
                                             9, 9, 9, 9, 9, 9, 9, 9, 9};
  for (std::size_t row = 0; row < positions.size(); ++row) {
    EXPECT_EQ(document_length(positions.data(), row, kLength), expected[row]) << row;
    EXPECT_EQ(document_length(nullptr, row, kLength), kLength);
  }
}

TEST(Rotary, OnlyDocumentsBeyondTheTrainedLengthHaveOtherFrequencies) {
  const Rotary plain = rotary_positions(config_of("null"), refuse);
  EXPECT_FALSE(plain.depends_on_documents(1U << 30U));
  const Rotary dynamic = rotary_positions(config_of(R"({"rope_type": "dynamic", "factor": 2,
                                            "original_max_position_embeddings": 100})"),
                                          refuse);
  EXPECT_FALSE(dynamic.depends_on_documents(100));
  EXPECT_TRUE(dynamic.depends_on_documents(101));
  EXPECT_EQ(frequencies_in_document(dynamic, 100), plain.frequencies);
  EXPECT_LT(frequencies_in_document(dynamic, 101).back(), plain.frequencies.back());
  EXPECT_LT(frequencies_in_document(dynamic, 102).back(),
            frequencies_in_document(dynamic, 101).back());
}

TEST(Rotary, UnknownTypesAreRefused) {
  const auto refusal = [](const std::string& scaling, std::uint64_t head_dim = 64) -> std::string {
    try {
      rotary_positions(config_of(scaling, head_dim), refuse);
      return "";
    } catch (const Error& error) {
      return error.what();
    }
  };
  const auto has = [](const std::string& message, const std::string& part) {
    return message.find(part) != std::string::npos;
  };
  EXPECT_EQ(refusal("null"), "");
  EXPECT_EQ(refusal(R"({"type": "linear", "factor": 2})"), "");
  EXPECT_TRUE(has(refusal(R"({"rope_type": "linearr", "factor": 2})"), "did you mean 'linear'"));
  EXPECT_TRUE(has(refusal(R"({"rope_type": "linear"})"), "lacks 'factor'"));
  EXPECT_TRUE(has(refusal(R"({"rope_type": "linear", "factor": -1})"), "'factor' must be"));
  EXPECT_TRUE(has(refusal(R"({"rope_type": "default", "fctor": 2})"), "unknown key 'fctor'"));
  EXPECT_TRUE(has(refusal(R"({"rope_type": "longrope", "short_factor": [1], "factor": 2,
                       "original_max_position_embeddings": 9})"),
                  "'short_factor' must be 32 numbers"));
  EXPECT_TRUE(has(refusal(R"({"rope_type": "dynamic", "factor": 2,
                       "original_max_position_embeddings": 9})",
                          2),
                  "needs at least 4 rotary dimensions"));
  EXPECT_TRUE(has(refusal("null", 7), "head_dim: 7 is odd"));
  EXPECT_TRUE(has(refusal(R"({"rope_type": "default", "partial_rotary_factor": 0.02})"),
                  "partial_rotary_factor: 0.02 of head_dim 64 is 1 values"));
  EXPECT_TRUE(has(refusal(R"({"rope_type": "default", "partial_rotary_factor": 1e18})"),
                  "partial_rotary_factor: 1e+18 of head_dim 64 is 6.4e+19 values"));
}

}  // namespace
}  // namespace ballast::model::rotary_test
