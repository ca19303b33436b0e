// Adapters of all experts of a layer in files of PEFT and others.
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/config/adapter_folder.h"
#include "ballast/core/error.h"
#include "ballast/formats/safetensors.h"

#include "src/formats/adapter_files.h"
#include "tests/support/expect_error.h"
#include "tests/support/temp_dir.h"

namespace ballast::formats::stacked_adapters_test {
namespace {

namespace fs = std::filesystem;
using Values = std::vector<float>;

constexpr std::uint64_t kExperts = 3;
constexpr std::uint64_t kRank = 2;

float a_value(std::uint64_t e, std::uint64_t j, std::uint64_t i) {
  return static_cast<float>(1000 + 100 * e + 10 * j + i);
}
float b_value(std::uint64_t e, std::uint64_t o, std::uint64_t j) {
  return static_cast<float>(2000 + 100 * e + 10 * o + j);
}

/// A folder with the adapter of maps [out, in] in one of the orders.
struct StackFolder {
  StackFolder(std::uint64_t in, std::uint64_t out, bool exchanged, bool adjacent) {
    const std::uint64_t wide = exchanged ? out : in;
    const std::uint64_t high = exchanged ? in : out;
    Values a;
    for (std::uint64_t e = 0; e < kExperts; ++e) {
      for (std::uint64_t j = 0; j < kRank; ++j) {
        for (std::uint64_t i = 0; i < wide; ++i) {
          a.push_back(exchanged ? b_value(e, i, j) : a_value(e, j, i));
        }
      }
    }
    Values b(high * kExperts * kRank);
    for (std::uint64_t o = 0; o < high; ++o) {
      for (std::uint64_t e = 0; e < kExperts; ++e) {
        for (std::uint64_t j = 0; j < kRank; ++j) {
          const std::uint64_t column = adjacent ? e * kRank + j : j * kExperts + e;
          b[o * kExperts * kRank + column] = exchanged ? a_value(e, j, o) : b_value(e, o, j);
        }
      }
    }
    SafetensorsWriter writer(
        dir.path() / config::kAdapterWeights,
        {{"a", DType::f32, {kExperts * kRank, wide}}, {"b", DType::f32, {high, kExperts * kRank}}});
    writer.write("a", a, 0);
    writer.write("b", b, 0);
    writer.finish();
  }
  [[nodiscard]] StackedAdapter read(const std::string& settings, std::uint64_t in,
                                    std::uint64_t out, bool can_be_exchanged = true) const {
    std::ofstream(dir.path() / config::kAdapterConfig) << settings;
    StackedOrder order = StackedOrder::read(dir.path());
    order.can_be_exchanged = can_be_exchanged;
    return read_stacked_adapter(WeightFiles(dir.path()), "a", "b", order, kExperts, in, out);
  }
  test::TempDir dir;
};

void expect_values(const StackedAdapter& found, std::uint64_t in, std::uint64_t out) {
  ASSERT_EQ(found.rank, kRank);
  ASSERT_EQ(found.in, in);
  ASSERT_EQ(found.out, out);
  for (std::uint64_t e = 0; e < kExperts; ++e) {
    for (std::uint64_t j = 0; j < kRank; ++j) {
      for (std::uint64_t i = 0; i < in; ++i) {
        EXPECT_EQ(found.a_of(e)[j * in + i], a_value(e, j, i));
      }
      for (std::uint64_t o = 0; o < out; ++o) {
        EXPECT_EQ(found.b_of(e)[o * kRank + j], b_value(e, o, j));
      }
    }
  }
}

TEST(StackedAdapters, HaveTheOrderOfTheirVersion) {
  const std::string now = R"({"peft_version": "0.21.2"})";
  const std::string before = R"({"peft_version": "0.18.1"})";
  const StackFolder straight(4, 6, false, false);
  const StackFolder crossed(4, 6, true, false);
  // Different sides show the order, whatever the version.
  for (const std::string& settings : {now, before, std::string("{}")}) {
    expect_values(straight.read(settings, 4, 6), 4, 6);
    expect_values(crossed.read(settings, 4, 6), 4, 6);
    expect_values(crossed.read(settings, 0, 6), 4, 6);
    expect_values(straight.read(settings, 4, 0), 4, 6);
  }
  expect_values(StackFolder(5, 5, false, false).read(now, 5, 5), 5, 5);
  expect_values(StackFolder(5, 5, true, false).read(before, 5, 5), 5, 5);
  expect_values(StackFolder(5, 5, true, false).read(R"({"peft_version": "0.19.0"})", 5, 5), 5, 5);
  expect_values(StackFolder(5, 5, false, false).read(R"({"peft_version": "0.19.1"})", 5, 5), 5, 5);
  // Parameters [experts, in, out] never were exchanged.
  expect_values(StackFolder(5, 5, false, false).read(before, 5, 5, false), 5, 5);
  expect_values(StackFolder(4, 6, false, true).read(R"({"lora_B_layout": "expert_major"})", 4, 6),
                4, 6);
}

TEST(StackedAdapters, OfUnknownOrderAreRefused) {
  const StackFolder square(5, 5, false, false);
  test::expect_error(ErrorCategory::data, {"tensor 'a'", "set peft_version in adapter_config.json"},
                     [&] { static_cast<void>(square.read("{}", 5, 5)); });
  test::expect_error(ErrorCategory::data, {"lora_B_layout is \"x\"", "rank_major"},
                     [&] { static_cast<void>(square.read(R"({"lora_B_layout": "x"})", 5, 5)); });
  test::expect_error(ErrorCategory::data, {"have shapes [6, 5] and [5, 6]", "need [3 r, 7]"},
                     [&] { static_cast<void>(square.read("{}", 7, 5)); });
}

}  // namespace
}  // namespace ballast::formats::stacked_adapters_test
