#include <algorithm>
#include <array>
#include <cmath>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include "ballast/core/units.h"

#include "tools/live/view.h"

namespace ballast::tools {
namespace {

constexpr std::size_t kMaxGroups = 1024;
constexpr std::size_t kGaugeName = 11;  ///< columns

enum class Style { plain, strong, dim, bar, warning };

std::string_view sequence_of(Style style) {
  switch (style) {
    case Style::plain:
      return "";
    case Style::strong:
      return "\x1b[1m";
    case Style::dim:
      return "\x1b[2m";
    case Style::bar:
      return "\x1b[36m";
    case Style::warning:
      return "\x1b[33m";
  }
  return "";
}

/// A line of text that is cut off at the last column.
class Line {
 public:
  explicit Line(const FrameOptions& options) : options_(options) {}

  /// Counts one column per character, since no character here is wider. Control characters become
  /// '?'.
  Line& add(std::string_view text, Style style = Style::plain) {
    const bool styled = options_.colour && style != Style::plain && !text.empty();
    if (styled) text_ += sequence_of(style);
    bool cut = false;
    for (const char byte : text) {
      const auto code = static_cast<unsigned char>(byte);
      const bool continues = (code & 0xC0U) == 0x80;
      if (!continues) cut = width_ == options_.columns;
      if (cut) continue;
      text_ += code < 0x20 || code == 0x7F ? '?' : byte;
      width_ += continues ? 0 : 1;
    }
    if (styled) text_ += "\x1b[0m";
    return *this;
  }

  /// Pads with blanks up to the last column to overwrite what was there.
  [[nodiscard]] std::string text() {
    add(std::string(options_.columns - width_, ' '));
    return text_;
  }

 private:
  const FrameOptions& options_;
  std::string text_;
  std::size_t width_ = 0;
};

constexpr std::array<std::string_view, 9> kRising = {" ", "▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
constexpr std::array<std::string_view, 9> kGrowing = {"", "▏", "▎", "▍", "▌", "▋", "▊", "▉", "█"};
constexpr std::array<std::string_view, 9> kRisingAscii = {" ", ".", ".", ":", ":",
                                                          "+", "+", "#", "#"};

std::string bar(double share, std::size_t width, bool unicode) {
  const double eighths = std::clamp(share, 0.0, 1.0) * static_cast<double>(8 * width);
  auto filled = static_cast<std::size_t>(std::lround(eighths));
  if (share > 0.0) filled = std::max<std::size_t>(filled, 1);  // at least one cell
  std::string text;
  for (std::size_t column = 0; column < width; ++column) {
    const std::size_t here = std::min<std::size_t>(8, filled - std::min(filled, 8 * column));
    if (unicode) {
      text += here > 0 ? kGrowing[here] : "·";
    } else {
      text += here >= 4 || (column == 0 && here > 0) ? '#' : '-';
    }
  }
  return text;
}

/// Rows of a chart of `values`, the top row first, with the bounds of the axis on the left.
std::vector<std::string> chart(const LiveState& state, const FrameOptions& options,
                               std::size_t height) {
  constexpr std::size_t kAxis = 9;
  std::vector<std::string> rows;
  const std::size_t width = options.columns > kAxis + 1 ? options.columns - kAxis - 1 : 1;
  const std::vector<double> values = state.losses.means(width);
  if (values.empty()) return rows;
  const auto [least, greatest] = std::minmax_element(values.begin(), values.end());
  const double span = *greatest > *least ? *greatest - *least : 1.0;
  const auto& glyphs = options.unicode ? kRising : kRisingAscii;
  for (std::size_t row = 0; row < height; ++row) {
    Line line(options);
    const std::size_t below = 8 * (height - 1 - row);
    std::string label;
    if (row == 0) label = fmt::format("{:.4g}", *greatest);
    if (row + 1 == height && height > 1) label = fmt::format("{:.4g}", *least);
    line.add(fmt::format("{:>{}} ", label, kAxis - 1), Style::dim);
    std::string text;
    for (const double value : values) {
      // The least value fills one eighth, so that a column with steps is never empty.
      const double share = (value - *least) / span;
      const auto level = 1 + std::llround(share * static_cast<double>(8 * height - 1));
      const auto here = std::clamp<long long>(level - static_cast<long long>(below), 0, 8);
      text += glyphs[static_cast<std::size_t>(here)];
    }
    rows.push_back(line.add(text, Style::bar).text());
  }
  return rows;
}

/// Drops the last comma-separated parts of `text` that do not fit, so that no word or number is
/// cut.
std::string_view fitted(std::string_view text, std::size_t columns) {
  while (text.size() > columns) {
    const std::size_t comma = text.rfind(", ");
    if (comma == std::string_view::npos || comma == 0) break;
    text = text.substr(0, comma);
  }
  return text;
}

struct Row {
  int rank;  ///< rows of the greatest rank are dropped first if there is no room; 0 is the last one
  std::string text;
};

std::string time_left(const std::optional<TimeLeft>& left) {
  if (!left) return "eta after 3 steps";
  const std::string low = format_seconds(left->low);
  const std::string high = format_seconds(left->high);
  const std::string range = low == high ? low : low + " to " + high;
  return fmt::format("eta {}, at the pace of the last {} steps and of all", range, left->steps);
}

Row head_row(const LiveState& state, const FrameOptions& options) {
  Line line(options);
  line.add(fmt::format("step {}/{}", state.step, state.steps), Style::strong);
  return {0, line.add("  ").add(state.title).text()};
}

/// Number of columns of a bar. All bars have the same length, even if there is little room for the
/// texts.
std::size_t bar_width(const LiveState& state, const FrameOptions& options) {
  constexpr std::size_t kText = 26;
  constexpr std::size_t kShortest = 8;
  if (options.columns >= kGaugeName + kText + kShortest) {
    return options.columns - kGaugeName - kText;
  }
  std::size_t longest = 0;
  for (const auto* gauges : {&state.tiers, &state.lanes}) {
    for (const Gauge& gauge : *gauges) longest = std::max(longest, gauge.text.size());
  }
  return options.columns - std::min(options.columns, kGaugeName + 1 + std::min(kText, longest));
}

Row gauge_row(const Gauge& gauge, const FrameOptions& options, int rank, std::size_t width) {
  Line line(options);
  line.add(fmt::format("{:<{}}", gauge.name, kGaugeName));
  const std::string filled =
      gauge.share ? bar(*gauge.share, width, options.unicode) : std::string(width, ' ');
  line.add(filled, Style::bar);
  return {rank, line.add(" ").add(gauge.text).text()};
}

/// All rows except the chart, with `chart_at` where the chart belongs.
std::vector<Row> other_rows(const LiveState& state, const FrameOptions& options,
                            std::size_t& chart_at) {
  const auto row = [&](int rank, std::string_view text, Style style = Style::plain) {
    return Row{rank, Line(options).add(fitted(text, options.columns), style).text()};
  };
  const std::size_t width = bar_width(state, options);
  std::vector<Row> rows = {head_row(state, options)};
  const std::string loss = state.loss       ? fmt::format("loss {:.4f}", *state.loss)
                           : state.step > 0 ? "loss -"
                                            : "loss";
  const std::size_t room = options.columns - std::min(options.columns, loss.size());
  const std::string_view numbers = fitted(state.numbers, room);
  rows.push_back({0, Line(options)
                         .add(loss, Style::strong)
                         .add(numbers.size() > room ? std::string_view() : numbers)
                         .text()});
  chart_at = rows.size();
  rows.push_back(row(0, state.speed));
  rows.push_back(row(1, time_left(state.left)));
  rows.push_back(row(2, fmt::format("{}; {} so far", state.doing, format_seconds(state.elapsed))));
  if (!state.tiers.empty()) rows.push_back(row(5, "memory, share of the budget", Style::dim));
  for (const Gauge& tier : state.tiers) rows.push_back(gauge_row(tier, options, 4, width));
  if (!state.lanes.empty()) rows.push_back(row(7, "lanes, busy share of the step", Style::dim));
  for (const Gauge& lane : state.lanes) rows.push_back(gauge_row(lane, options, 6, width));
  for (std::size_t i = 0; i < state.warnings.size(); ++i) {
    const bool newest = i + 1 == state.warnings.size();
    rows.push_back({newest ? 1 : 8, Line(options).add(state.warnings[i], Style::warning).text()});
  }
  rows.push_back(row(3, "q leaves the view, the run continues", Style::dim));
  return rows;
}

/// Removes rows from the end of the greatest rank.
void shorten(std::vector<Row>& rows, std::size_t most) {
  while (rows.size() > most) {
    const auto less = [](const Row& a, const Row& b) { return a.rank < b.rank; };
    const auto found = std::max_element(rows.rbegin(), rows.rend(), less);
    rows.erase(std::next(found).base());
  }
}

}  // namespace

void LossHistory::add(double loss) {
  if (groups_.empty() || groups_.back().count == steps_) {
    if (groups_.size() == kMaxGroups) {
      for (std::size_t i = 0; i < kMaxGroups / 2; ++i) {
        const Group& a = groups_[2 * i];
        const Group& b = groups_[2 * i + 1];
        groups_[i] = {.sum = a.sum + b.sum, .count = a.count + b.count};
      }
      groups_.resize(kMaxGroups / 2);
      steps_ *= 2;
    }
    groups_.emplace_back();
  }
  if (!std::isfinite(loss)) return;
  groups_.back().sum += loss;
  ++groups_.back().count;
}

std::vector<double> LossHistory::means(std::size_t most) const {
  std::vector<double> means;
  most = std::max<std::size_t>(most, 1);
  const std::size_t each = std::max<std::size_t>(1, (groups_.size() + most - 1) / most);
  for (std::size_t begin = 0; begin < groups_.size(); begin += each) {
    Group all;
    for (std::size_t i = begin; i < std::min(begin + each, groups_.size()); ++i) {
      all.sum += groups_[i].sum;
      all.count += groups_[i].count;
    }
    if (all.count > 0) means.push_back(all.sum / static_cast<double>(all.count));
  }
  return means;
}

std::vector<std::string> frame_lines(const LiveState& state, const FrameOptions& options) {
  std::size_t chart_at = 0;
  std::vector<Row> rows = other_rows(state, options, chart_at);
  shorten(rows, std::max<std::size_t>(1, options.rows - std::min<std::size_t>(options.rows, 1)));
  const std::size_t room = options.rows - std::min(options.rows, rows.size());
  std::vector<std::string> lines;
  lines.reserve(options.rows);
  for (const Row& row : rows) lines.push_back(row.text);
  const auto curve = chart(state, options, std::min(room, options.rows / 3));
  chart_at = std::min(chart_at, lines.size());
  lines.insert(lines.begin() + static_cast<std::ptrdiff_t>(chart_at), curve.begin(), curve.end());
  return lines;
}

}  // namespace ballast::tools
