#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

namespace ballast::tools {

/// The losses of a run in at most 1024 means of equally many steps.
class LossHistory {
 public:
  /// A loss that is not finite is left out.
  void add(double loss);
  /// At most `most` means, the oldest first; empty without a finite loss.
  [[nodiscard]] std::vector<double> means(std::size_t most) const;

 private:
  struct Group {
    double sum = 0.0;
    std::uint64_t count = 0;
  };

  std::vector<Group> groups_;
  std::uint64_t steps_ = 1;  ///< of a group
};

/// A bar: `share` (0 to 1) of its length is full; without one there is no bar.
struct Gauge {
  std::string name;
  std::optional<double> share;
  std::string text;  ///< the numbers behind it
};

/// Time to the end of a run.
struct TimeLeft {
  double low = 0.0;  ///< seconds
  double high = 0.0;
  std::uint64_t steps = 0;  ///< the last ones, whose pace is one of the two estimates
};

/// What the live view shows.
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
  std::deque<std::string> warnings;  ///< the newest last
};

struct FrameOptions {
  std::size_t columns = 80;
  std::size_t rows = 24;
  bool colour = true;   ///< otherwise no escape sequence is in the lines
  bool unicode = true;  ///< otherwise ASCII
};

/// At most `rows` lines of at most `columns` columns: what matters most if there is little room.
std::vector<std::string> frame_lines(const LiveState& state, const FrameOptions& options);

}  // namespace ballast::tools
