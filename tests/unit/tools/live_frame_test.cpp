#include <cmath>
#include <limits>
#include <string>

#include <gtest/gtest.h>

#include "tools/live/view.h"

namespace ballast::tools::live_frame_test {
namespace {

LiveState full_state() {
  LiveState state = {.title = "ballast train a.json",
                     .doing = "step 8 running",
                     .step = 7,
                     .steps = 20,
                     .elapsed = 12.0,
                     .loss = 2.5,
                     .numbers = ", lr 1.00e-03",
                     .speed = "900 tok/s",
                     .left = TimeLeft{.low = 60.0, .high = 90.0, .steps = 6},
                     .tiers = {{.name = "device", .share = 0.5, .text = "1 GiB of 2 GiB"},
                               {.name = "host", .share = 0.0, .text = "0 B"},
                               {.name = "nvme", .share = {}, .text = "9 GiB"}},
                     .lanes = {{.name = "compute", .share = 1.0, .text = "100%"},
                               {.name = "update", .share = 0.001, .text = "  0%"}},
                     .warnings = {"older", "newest"}};
  for (const double loss : {4.0, 3.5, 3.0, 2.5}) state.losses.add(loss);
  return state;
}

std::size_t columns_of(const std::string& line) {
  std::size_t count = 0;
  for (const char byte : line) count += (static_cast<unsigned char>(byte) & 0xC0U) != 0x80 ? 1 : 0;
  return count;
}

bool has(const std::vector<std::string>& lines, std::string_view text) {
  for (const auto& line : lines) {
    if (line.find(text) != std::string::npos) return true;
  }
  return false;
}

TEST(LiveFrame, FillsEveryTerminalWithoutWrapping) {
  LiveState state = full_state();
  state.title += std::string(300, 'x');
  for (std::size_t columns = 1; columns <= 210; ++columns) {
    for (const std::size_t rows : {1U, 2U, 5U, 10U, 24U, 60U}) {
      const auto lines = frame_lines(state, {.columns = columns, .rows = rows, .colour = false});
      ASSERT_LE(lines.size(), rows) << columns << " x " << rows;
      ASSERT_GE(lines.size(), 1U);
      EXPECT_EQ(lines[0].substr(0, 4),
                std::string("step").substr(0, std::min<std::size_t>(4, columns)));
      for (const auto& line : lines) ASSERT_EQ(columns_of(line), columns) << line;
    }
  }
}

TEST(LiveFrame, DropsTheLeastImportantRows) {
  const auto at = [](std::size_t rows) {
    return frame_lines(full_state(), {.columns = 80, .rows = rows, .colour = false});
  };
  const auto all = at(24);
  for (const char* text : {"step 7/20", "loss 2.5000, lr", "900 tok/s", "eta 1m00s to 1m30s",
                           "of 2 GiB", "compute", "older", "newest", "q leaves", "last 6 steps"}) {
    EXPECT_TRUE(has(all, text)) << text;
  }
  EXPECT_FALSE(has(at(13), "older"));
  EXPECT_TRUE(has(at(13), "compute"));
  EXPECT_FALSE(has(at(10), "compute"));
  EXPECT_TRUE(has(at(10), "device"));
  EXPECT_FALSE(has(at(6), "device"));
  EXPECT_TRUE(has(at(6), "newest"));
  EXPECT_TRUE(has(at(3), "loss 2.5"));
}

TEST(LiveFrame, DrawsShares) {
  const auto lines = frame_lines(full_state(), {.columns = 61, .rows = 24, .colour = false});
  const auto line_of = [&](std::string_view name) {
    for (const auto& line : lines) {
      if (line.starts_with(name)) return line;
    }
    return std::string();
  };
  const auto count = [](const std::string& line, const std::string& glyph) {
    std::size_t found = 0;
    for (std::size_t at = line.find(glyph); at != line.npos; at = line.find(glyph, at + 1)) ++found;
    return found;
  };
  EXPECT_EQ(count(line_of("device"), "█"), 12U);
  EXPECT_EQ(count(line_of("device"), "·"), 12U);
  EXPECT_EQ(count(line_of("host"), "·"), 24U);
  EXPECT_TRUE(line_of("nvme").starts_with("nvme" + std::string(32, ' ') + "9 GiB"));
  EXPECT_EQ(count(line_of("compute"), "█"), 24U);
  EXPECT_EQ(count(line_of("update"), "▏"), 1U) << "little is not nothing";
  const auto ascii =
      frame_lines(full_state(), {.columns = 61, .rows = 24, .colour = false, .unicode = false});
  EXPECT_TRUE(has(ascii, "device     ############------------ 1 GiB"));
}

TEST(LiveFrame, AStepWithoutTargetsHasADash) {
  LiveState state = full_state();
  state.loss = std::nullopt;
  const FrameOptions options = {.columns = 80, .rows = 24, .colour = false};
  EXPECT_TRUE(has(frame_lines(state, options), "loss -, lr"));
  state.step = 0;
  EXPECT_FALSE(has(frame_lines(state, options), "loss -"));
}

TEST(LiveFrame, ANarrowTerminalHasBarsOfOneLengthAndWholeNumbers) {
  LiveState state = full_state();
  state.numbers = ", accuracy 75%, margin 0.2130, lr 1.00e-03, gradient norm 0.312";
  const auto lines =
      frame_lines(state, {.columns = 40, .rows = 24, .colour = false, .unicode = false});
  const auto end_of_bar = [&](std::string_view name) {
    for (const auto& line : lines) {
      if (line.starts_with(name)) return line.find_last_of("#-") + 1;
    }
    return std::string::npos;
  };
  // Names have 11 columns, and bars the columns that the longest text leaves: " 1 GiB of 2 GiB".
  for (const char* name : {"device", "host", "compute", "update"}) {
    EXPECT_EQ(end_of_bar(name), 40U - 15U) << name;
  }
  EXPECT_TRUE(has(lines, "loss 2.5000, accuracy 75%, margin 0.2130"));
  EXPECT_TRUE(has(lines, "eta 1m00s to 1m30s    "));
  EXPECT_FALSE(has(lines, "at the pace"));
}

TEST(LiveFrame, DrawsTheLossAndItsBounds) {
  const auto lines =
      frame_lines(full_state(), {.columns = 40, .rows = 24, .colour = false, .unicode = false});
  EXPECT_TRUE(has(lines, "       4 #"));
  EXPECT_TRUE(has(lines, "     2.5 ###."));
  LiveState first;
  EXPECT_TRUE(has(frame_lines(first, {}), "eta after 3 steps"));
}

TEST(LiveFrame, HasColoursAndNoOtherControls) {
  LiveState state = full_state();
  state.warnings.push_back("a\x1b[2Jb\tc");
  for (const auto& line : frame_lines(state, {.colour = false})) {
    EXPECT_EQ(line.find('\x1b'), line.npos);
    EXPECT_EQ(line.find('\t'), line.npos);
  }
  EXPECT_TRUE(has(frame_lines(state, {.colour = true}), "\x1b[36m"));
}

TEST(LossHistory, KeepsMeansOfAllSteps) {
  LossHistory history;
  for (int i = 0; i < 100'000; ++i) history.add(i < 50'000 ? 4.0 : 2.0);
  const auto means = history.means(10);
  ASSERT_LE(means.size(), 10U);
  ASSERT_GE(means.size(), 5U);
  EXPECT_EQ(means.front(), 4.0);
  EXPECT_EQ(means.back(), 2.0);
  LossHistory saw;
  for (int i = 0; i < 2048; ++i) saw.add(i % 2 == 0 ? 1.0 : 4.0);
  EXPECT_EQ(saw.means(1), std::vector<double>{2.5});
  LossHistory odd;
  EXPECT_TRUE(odd.means(10).empty());
  odd.add(std::numeric_limits<double>::quiet_NaN());
  EXPECT_TRUE(odd.means(10).empty());
  odd.add(3.0);
  EXPECT_EQ(odd.means(10), std::vector<double>{3.0});
}

}  // namespace
}  // namespace ballast::tools::live_frame_test
