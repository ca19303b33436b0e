#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace ballast::comm {

/// Who is in a channel: each member has a place in it and a rank in the run.
class Members {
 public:
  /// `ranks` by place, `rank` among them; none: all `world` ranks in order. Throws Error(state) for
  /// what is no such list.
  Members(std::span<const std::uint32_t> ranks, std::uint32_t rank, std::uint32_t world);

  [[nodiscard]] std::uint32_t count() const { return static_cast<std::uint32_t>(ranks_.size()); }
  /// This rank's place.
  [[nodiscard]] std::uint32_t place() const { return place_; }
  /// The rank at place 0, which tells channels apart.
  [[nodiscard]] std::uint32_t first_rank() const { return ranks_.front(); }
  /// Whether these are all ranks, each at the place of its number.
  [[nodiscard]] bool all_in_order() const { return all_in_order_; }
  /// Places in the order of their ranks: the order of sums.
  [[nodiscard]] std::span<const std::uint32_t> by_rank() const { return by_rank_; }
  /// Where in that order a place is.
  [[nodiscard]] std::uint32_t turn(std::uint32_t place) const { return turns_[place]; }

 private:
  std::vector<std::uint32_t> ranks_;
  std::vector<std::uint32_t> by_rank_;
  std::vector<std::uint32_t> turns_;
  std::uint32_t place_ = 0;
  bool all_in_order_ = false;
};

}  // namespace ballast::comm
