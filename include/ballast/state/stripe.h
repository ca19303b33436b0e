#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "ballast/core/units.h"

namespace ballast::state {

/// Unit of checksums in the swap space. A chunk is in one file.
inline constexpr Bytes kChunk = 1 * kMiB;

/// A contiguous part of an extent in the file of one path.
struct Segment {
  std::size_t path = 0;
  Bytes offset = 0;  ///< in the file
  Bytes start = 0;   ///< in the extent
  Bytes bytes = 0;
};

/// Distributes extents (the NVMe homes of a run) over the files of several paths. A pure function
/// of its arguments. Extents are cut into segments of `segment_bytes`. Each segment goes to the
/// path with the fewest bytes relative to its weight, so that all paths are busy for about the same
/// time.
class Stripe {
 public:
  Stripe() = default;
  /// `extents`: sizes, rounded up to whole pages. `weights`: relative speeds, one per path.
  /// `segment_bytes` is rounded up to whole chunks. Throws Error(state) without paths, or for a
  /// weight that is not finite and above 0.
  Stripe(std::span<const Bytes> extents, std::span<const double> weights, Bytes segment_bytes);

  [[nodiscard]] std::size_t extents() const { return extents_.size(); }
  /// Arguments of the constructor.
  [[nodiscard]] const std::vector<double>& weights() const { return weights_; }
  [[nodiscard]] Bytes segment_bytes() const { return segment_bytes_; }
  [[nodiscard]] std::size_t paths() const { return file_bytes_.size(); }
  /// Returns all parts of an extent in order.
  [[nodiscard]] std::span<const Segment> segments(std::size_t extent) const;
  [[nodiscard]] Bytes extent_bytes(std::size_t extent) const { return extents_.at(extent).bytes; }
  /// Returns the index of the extent's first chunk among all chunks.
  [[nodiscard]] std::size_t first_chunk(std::size_t extent) const;
  [[nodiscard]] std::size_t chunks() const { return chunks_; }
  [[nodiscard]] Bytes file_bytes(std::size_t path) const { return file_bytes_.at(path); }
  /// Size of all files.
  [[nodiscard]] Bytes bytes() const;

 private:
  struct Extent {
    Bytes bytes = 0;
    std::size_t first_chunk = 0;
    std::size_t first_segment = 0;
    std::size_t segments = 0;
  };
  std::vector<double> weights_;
  Bytes segment_bytes_ = 0;
  std::vector<Extent> extents_;
  std::vector<Segment> segments_;
  std::vector<Bytes> file_bytes_;
  std::size_t chunks_ = 0;
};

}  // namespace ballast::state
