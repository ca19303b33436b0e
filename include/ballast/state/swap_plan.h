#pragma once

#include <filesystem>
#include <span>
#include <vector>

#include "ballast/aio/file.h"
#include "ballast/aio/queue.h"
#include "ballast/state/stripe.h"

namespace ballast::state {

/// A directory that is swapped to.
struct SwapPath {
  std::filesystem::path directory;
  aio::QueueOptions io;
  double read_gbps = 0.0;  ///< measured bandwidth, 10^9 bytes a second; 0: unknown
  double write_gbps = 0.0;
  /// It need not exist yet: it will be made in the nearest directory above it that does.
  bool made_later = false;
};

struct SwapOptions {
  std::vector<SwapPath> paths;  ///< no directory twice
  aio::File::Access access = aio::File::Access::direct;
  bool any_file_system = false;  ///< take file systems that do not suit swapping
};

/// Where each byte of the swap space goes.
struct SwapPlan {
  SwapOptions options;
  Stripe stripe;
};

/// Lays extents of these sizes out over the paths, in proportion to their bandwidth (the harmonic
/// mean of reading and writing, for each byte is read and written). Paths whose bandwidth is
/// unknown, if there are several, are measured now: some MiB are written and read, and one log line
/// tells the result. Removes what dead runs left. Throws Error(io), one line that names the path,
/// the need, what is there and what to do, when a path is missing, no directory, not writable, has
/// no direct I/O, does not suit swapping, or when the paths on one file system have not the space
/// that their files together need. Nothing stays allocated.
SwapPlan plan_swap(SwapOptions options, std::span<const Bytes> extents);

}  // namespace ballast::state
