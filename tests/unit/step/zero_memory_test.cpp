
#include "tests/support/zero_memory.h"

#include <array>
#include <cmath>
#include <string>

#include <gtest/gtest.h>

#include "ballast/core/error.h"

namespace ballast::step::zero_memory_test {
namespace {

/// One row of Table 1 of arXiv 1910.02054: GB per device with states split (stage 1), gradients too
/// (2) and weights too (3), as printed there.
struct Row {
  std::uint64_t ranks;
  std::array<const char*, 3> printed;
};

struct Model {
  double parameters;
  std::array<Row, 6> rows;
};

constexpr std::array<Model, 3> kTable = {{
    {7.5e9,
     {{{1, {"120", "120", "120"}},
       {4, {"52.5", "41.3", "30"}},
       {16, {"35.6", "21.6", "7.5"}},
       {64, {"31.4", "16.6", "1.88"}},
       {256, {"30.4", "15.4", "0.47"}},
       {1024, {"30.1", "15.1", "0.12"}}}}},
    {128e9,
     {{{1, {"2048", "2048", "2048"}},
       {4, {"896", "704", "512"}},
       {16, {"608", "368", "128"}},
       {64, {"536", "284", "32"}},
       {256, {"518", "263", "8"}},
       {1024, {"513", "257", "2"}}}}},
    {1e12,
     {{{1, {"16000", "16000", "16000"}},
       {4, {"7000", "5500", "4000"}},
       {16, {"4750", "2875", "1000"}},
       {64, {"4187", "2218", "250"}},
       {256, {"4046", "2054", "62.5"}},
       {1024, {"4011", "2013", "15.6"}}}}},
}};

/// One unit of the last printed digit.
double unit_of(const std::string& printed) {
  const auto point = printed.find('.');
  return point == std::string::npos
             ? 1.0
             : std::pow(10.0, -static_cast<double>(printed.size() - point - 1));
}

TEST(ZeroMemory, GivesTable1OfTheZeroPaper) {
  for (const Model& model : kTable) {
    for (const Row& row : model.rows) {
      for (int stage = 1; stage <= 3; ++stage) {
        const std::string printed = row.printed.at(static_cast<std::size_t>(stage) - 1);
        const double gigabytes = total(zero_memory(model.parameters, row.ranks, stage)) / 1e9;
        // The paper rounds some entries and truncates others.
        EXPECT_NEAR(gigabytes, std::stod(printed), 0.999 * unit_of(printed))
            << model.parameters << " parameters, " << row.ranks << " ranks, stage " << stage;
      }
    }
  }
}

TEST(ZeroMemory, WithoutAStageEveryRankHoldsEverything) {
  const StateBytes bytes = zero_memory(1e9, 64, 0);
  EXPECT_EQ(bytes.weights, 2e9);
  EXPECT_EQ(bytes.gradients, 2e9);
  EXPECT_EQ(bytes.optimizer, 12e9);
}

TEST(ZeroMemory, TheBytesPerParameterAreTheCallersOwn) {
  const StateBytes bytes = zero_memory(1e9, 4, 3, kOwnStateBytes);
  EXPECT_EQ(bytes.weights, 0.5e9);
  EXPECT_EQ(bytes.gradients, 0.5e9);
  EXPECT_EQ(bytes.optimizer, 2.5e9);
  EXPECT_EQ(total(bytes), 3.5e9);
}

TEST(ZeroMemory, RefusesInvalidStagesAndWorlds) {
  EXPECT_THROW(static_cast<void>(zero_memory(1e9, 0, 1)), Error);
  EXPECT_THROW(static_cast<void>(zero_memory(1e9, 4, 4)), Error);
  EXPECT_THROW(static_cast<void>(zero_memory(1e9, 4, -1)), Error);
}

}  // namespace
}  // namespace ballast::step::zero_memory_test
