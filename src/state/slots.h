#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <span>
#include <vector>

#include "ballast/core/units.h"

namespace ballast::state {

/// The extent of the swap space that each home uses. A checkpoint keeps extents unchanged: the next
/// write of a home goes to another one of the same size, and the old one becomes free when no
/// checkpoint keeps it (redirect on write). Thread-safe for calls about different homes.
class Slots {
 public:
  Slots() = default;
  /// `extents`: sizes. The first `homes` extents belong to the homes in order, the others are
  /// spare.
  Slots(std::span<const Bytes> extents, std::size_t homes);

  /// Returns the extent with the last write of a home.
  [[nodiscard]] std::size_t extent(std::size_t home) const;
  /// Returns the extent for its next write, which becomes extent(home). Throws Error(state) if
  /// checkpoints keep all extents of its size.
  std::size_t for_writing(std::size_t home);
  /// Swaps the extents of two homes of equal size.
  void exchange(std::size_t home, std::size_t other);

  /// Keeps the extents of these homes for `checkpoint` until it is released.
  void keep(std::uint64_t checkpoint, std::span<const std::size_t> homes);
  /// Releases the extents of a checkpoint. Does nothing for an unknown one.
  void release(std::uint64_t checkpoint);
  [[nodiscard]] std::vector<std::uint64_t> checkpoints() const;

  /// Replaces the state after construction: the listed homes use these extents (home, extent),
  /// other homes any free ones, and checkpoints keep theirs. Throws Error(state) if that is
  /// impossible.
  void restore(std::span<const std::pair<std::size_t, std::size_t>> homes,
               const std::map<std::uint64_t, std::vector<std::size_t>>& kept);

 private:
  std::size_t take_free(Bytes size);

  mutable std::mutex mutex_;
  std::vector<Bytes> sizes_;          ///< by extent
  std::vector<std::size_t> extents_;  ///< by home
  std::vector<bool> in_use_;          ///< by extent: used by a home
  std::vector<std::size_t> keepers_;  ///< by extent: number of checkpoints that keep it
  std::map<Bytes, std::vector<std::size_t>> free_;
  std::map<std::uint64_t, std::vector<std::size_t>> kept_;  ///< by checkpoint
};

}  // namespace ballast::state
