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
  double read_gbps = 0.0;  ///< measured bandwidth, 10^9 bytes a second; 0: unknown
  double write_gbps = 0.0;
  /// The directory may be missing; it will be created below its nearest existing parent.
  bool made_later = false;
  std::string key;  ///< the setting that names the directory, for messages; "" without one
};

struct SwapOptions {
  std::vector<SwapPath> paths;  ///< no directory twice
  aio::File::Access access = aio::File::Access::direct;
  bool any_file_system = false;  ///< accept file systems that do not suit swapping
  std::string any_file_system_key = "aio.any_file_system";  ///< its name in messages
};

struct SwapPlan {
  SwapOptions options;
  Stripe stripe;
  std::vector<std::filesystem::path> files = {};  ///< existing ones, by path; empty: new ones
};

/// The swap files of a run, for another run that goes on with what is in them.
struct SwapImage {
  std::vector<std::filesystem::path> files;  ///< by path
  std::vector<Bytes> extents;                ///< sizes; this and the rest: see Stripe
  std::vector<double> weights;
  Bytes segment_bytes = 0;

  [[nodiscard]] Stripe stripe() const { return {extents, weights, segment_bytes}; }
};

/// Checks that every path is a directory that takes swap files. Throws Error(io) naming the key and
/// the path when one is missing, not a directory, not writable, without direct I/O or not suited
/// for swapping.
void check_paths(const SwapOptions& options);

/// Lays extents of these sizes out over the paths, in proportion to their bandwidth (the harmonic
/// mean of reading and writing, because each byte is read and written). With several paths,
/// measures those of unknown bandwidth by writing and reading up to 64 MiB each, and logs one line.
/// Throws like check_paths(), and Error(io) naming the path, the need, the available space and a
/// remedy when a file system lacks space for the files of its paths. Nothing stays allocated.
SwapPlan plan_swap(SwapOptions options, std::span<const Bytes> extents);

/// Bytes of the swap files with these extents that will be on the file system of `place`, if all
/// paths are there. Otherwise 0: how the paths share them may depend on a measurement.
Bytes swap_bytes_on(const std::filesystem::path& place, const SwapOptions& options,
                    std::span<const Bytes> extents);

/// A plan that uses the files of `image` again, which may have to grow for the last of `extents`;
/// nothing if its own extents or paths are others. Throws like check_paths().
std::optional<SwapPlan> reuse_swap(SwapOptions options, std::span<const Bytes> extents,
                                   const SwapImage& image);

}  // namespace ballast::state
