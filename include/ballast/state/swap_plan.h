#pragma once

#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ballast/aio/file.h"
#include "ballast/aio/queue.h"
#include "ballast/state/stripe.h"

namespace ballast::state {

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
