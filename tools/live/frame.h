#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

namespace ballast::tools {

/// The losses of a run, condensed into at most 1024 means over equal numbers of steps.
class LossHistory {
 public:
  /// Ignores a loss that is not finite.
  void add(double loss);
  /// At most `most` means, the oldest first. Empty if no loss is finite.
  [[nodiscard]] std::vector<double> means(std::size_t most) const;

 private:
  struct Group {
    double sum = 0.0;
    std::uint64_t count = 0;
  };

  std::vector<Group> groups_;
  std::uint64_t steps_ = 1;  ///< steps per group
};

/// A bar. `share` (0 to 1) of its length is filled; without a share there is no bar.
struct Gauge {
  std::string name;
  std::optional<double> share;
  std::string text;  ///< the numbers next to it
};

/// Estimates of the time to the end of a run.
struct TimeLeft {
  double low = 0.0;  ///< seconds
  double high = 0.0;
  std::uint64_t steps = 0;  ///< number of last steps whose pace gives one of the two estimates
};

/// The content of the live view.
struct LiveState {
  std::string title;
  std::string doing;  ///< "step 5 running"
  std::uint64_t step = 0;
  std::uint64_t steps = 0;
  double elapsed = 0.0;  ///< seconds
  std::optional<double> loss;
  std::string numbers;  ///< "lr 1.00e-03, norm 0.32, ..."
  std::string speed;    ///< "12.3k tok/s, ..."
  std::optional<TimeLeft> left;
  LossHistory losses;
  std::vector<Gauge> tiers;
  std::vector<Gauge> lanes;
  std::deque<std::string> warnings;  ///< the latest last
};

struct FrameOptions {
  std::size_t columns = 80;
  std::size_t rows = 24;
  bool colour = true;   ///< if false, the lines contain no escape sequences
  bool unicode = true;  ///< if false, ASCII
};

/// Returns at most `rows` lines of at most `columns` columns. If there is little room, the most
/// important lines remain.
std::vector<std::string> frame_lines(const LiveState& state, const FrameOptions& options);

}  // namespace ballast::tools
