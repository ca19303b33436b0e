#include <cstdint>
#include <memory>
#include <vector>

#include <gtest/gtest.h>

#include "src/engine/handlers.h"

namespace ballast::engine::report_test {
namespace {

/// With pairs the head reports several numbers per micro-batch, and the routers' losses follow
/// them.
TEST(Report, EveryLossHasItsOwnPlace) {
  for (const std::uint64_t numbers : {1U, 4U, 12U}) {
    model::StepProgram program;
    using model::BufferRule;
    program.classes = {{.name = "batch", .bytes = 64, .buffers = BufferRule::step},
                       {.name = "losses", .bytes = numbers * 8, .buffers = BufferRule::report},
                       {.name = "logits", .bytes = 128, .buffers = BufferRule::scratch},
                       {.name = "losses of routers", .bytes = 16, .buffers = BufferRule::report}};
    const step::Problem problem = {.index = std::make_shared<step::ProgramIndex>(program),
                                   .micro_batches = 3};
    std::vector<double> report(3 * (numbers + 2));
    const HostBytes bytes = std::as_writable_bytes(std::span(report));
    std::vector<int> owners(report.size());
    const std::vector<ReportPart> parts = report_parts(problem);
    ASSERT_EQ(parts.size(), 2U);
    EXPECT_EQ(parts.front().of, 1U);
    EXPECT_EQ(parts.back().at(3), report.size() * sizeof(double));
    for (const ReportPart& part : parts) {
      for (std::uint32_t micro = 0; micro < 3; ++micro) {
        for (const double& loss : part.in(bytes, micro)) ++owners.at(&loss - report.data());
      }
    }
    EXPECT_EQ(owners, std::vector<int>(report.size(), 1)) << numbers << " numbers of the head";
  }
}

}  // namespace
}  // namespace ballast::engine::report_test
