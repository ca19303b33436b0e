#pragma once

#include <cstddef>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ballast/aio/file.h"
#include "ballast/aio/queue.h"
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

/// A directory for swap files.
struct SwapPath {
  std::filesystem::path directory;
  aio::QueueOptions io;
  double read_gbps = 0.0;  ///< measured bandwidth in 10^9 bytes per second; 0: unknown
  double write_gbps = 0.0;
  /// True if the directory may be missing; it is then created below its nearest existing parent.
  bool made_later = false;
  std::string key;  ///< config key that sets the directory, for messages; "" if none

  /// Returns the directory, or its nearest existing parent if it is created later.
  [[nodiscard]] std::filesystem::path existing() const;
  /// Returns the type of its file system: "ext4". Throws Error(io) if existing() is no directory.
  [[nodiscard]] std::string file_system() const;
};

struct SwapOptions {
  std::vector<SwapPath> paths;  ///< directories, each only once
  aio::File::Access access = aio::File::Access::direct;
  bool any_file_system = false;  ///< accept file systems that are not suited for swapping
  std::string any_file_system_key = "aio.any_file_system";  ///< name of this setting in messages
};

struct SwapPlan {
  SwapOptions options;
  Stripe stripe;
  std::vector<std::filesystem::path> files = {};  ///< existing ones by path; empty: new ones
};

/// The swap files of a run, for a later run that continues with their content.
struct SwapImage {
  std::vector<std::filesystem::path> files;  ///< by path
  std::vector<Bytes> extents;                ///< sizes; for the other fields see Stripe
  std::vector<double> weights;
  Bytes segment_bytes = 0;

  [[nodiscard]] Stripe stripe() const { return {extents, weights, segment_bytes}; }
};

/// Checks that every path is a directory for swap files. Throws Error(io) with the key and the path
/// if one is missing, not a directory, not writable, without direct I/O or not suited for swapping.
void check_paths(const SwapOptions& options);

/// Distributes extents of these sizes over the paths, in proportion to their bandwidth (the
/// harmonic mean of reading and writing, because each byte is read and written). If there are
/// several paths, measures those of unknown bandwidth by writing and reading up to 64 MiB each, and
/// logs one line. Throws like check_paths(), and Error(io) with the path, the need, the available
/// space and a remedy if a file system lacks space for the files of its paths. Nothing stays
/// allocated.
SwapPlan plan_swap(SwapOptions options, std::span<const Bytes> extents);

/// Returns the bytes of the swap files with these extents that will be on the file system of
/// `place`, if all paths are there. Otherwise returns 0, because the distribution over the paths
/// may depend on a measurement.
Bytes swap_bytes_on(const std::filesystem::path& place, const SwapOptions& options,
                    std::span<const Bytes> extents);

/// Plans to reuse the files of `image`, which may have to grow for the last of `extents`. Empty if
/// its extents, the number of paths, or their file systems differ. Throws like check_paths().
std::optional<SwapPlan> reuse_swap(SwapOptions options, std::span<const Bytes> extents,
                                   const SwapImage& image);

}  // namespace ballast::state
