#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>

namespace ballast::step {

/// Counts how often data must be loaded into `places` buffers with least-recently-used replacement:
/// if at least `places` others were used since their last use, or if they were never used, or
/// loaded in another case. `when`: the case in which the data are needed, or always.
class Misses {
 public:
  /// The pass in which an expert had rows; empty for any pass.
  using When = std::optional<std::int64_t>;
  static constexpr std::int64_t kInStep = -1;
  static constexpr std::int64_t kInStepBefore = -2;

  explicit Misses(std::size_t places) : places_(places) {}

  bool use(std::uint32_t block, When when = {}) {
    const auto last = std::find(uses_.rbegin(), uses_.rend(), block);
    bool missing =
        last == uses_.rend() || std::set<std::uint32_t>(uses_.rbegin(), last).size() >= places_;
    uses_.push_back(block);
    const auto brought = brought_.find(block);
    missing = missing || (brought->second && brought->second != when);
    if (missing) brought_[block] = when;
    return missing;
  }

 private:
  std::size_t places_;
  std::deque<std::uint32_t> uses_;
  std::map<std::uint32_t, When> brought_;
};

}  // namespace ballast::step
