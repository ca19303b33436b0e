#include "src/engine/report.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

namespace ballast::engine::report_test {
namespace {

/// With pairs the head reports several numbers per micro-batch, and the routers' losses follow
/// them.
TEST(Report, EveryLossHasItsOwnPlace) {
  for (const std::uint64_t pairs : {0U, 1U, 3U}) {
    Blueprint blueprint = {
        .shape = {.sequences = 2 * std::max<std::uint64_t>(pairs, 1), .length = 8},
        .micro_batches = 3};
    blueprint.pairs = pairs > 0;
    ASSERT_EQ(blueprint.head_losses(), pairs == 0 ? 1 : 4 * pairs);
    const std::uint64_t all = 3 * (blueprint.head_losses() + kRouterLosses);
    std::vector<int> owners(all);
    const auto own = [&](const ReportPart& part) {
      ASSERT_LE(part.offset + part.bytes, all * sizeof(double));
      for (Bytes at = part.offset; at < part.offset + part.bytes; at += sizeof(double)) {
        ++owners[at / sizeof(double)];
      }
    };
    for (std::uint32_t micro = 0; micro < 3; ++micro) {
      own(head_losses_in(blueprint, micro));
      own(router_losses_in(blueprint, micro));
    }
    EXPECT_EQ(owners, std::vector<int>(all, 1)) << pairs << " pairs";
  }
}

}  // namespace
}  // namespace ballast::engine::report_test
