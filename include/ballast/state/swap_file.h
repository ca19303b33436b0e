#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <vector>

#include "ballast/aio/queue.h"
#include "ballast/core/view.h"

namespace ballast::state {

/// A range of the swap file, 4 KiB-aligned.
struct Extent {
  Bytes offset = 0;
  Bytes bytes = 0;
  std::size_t first_chunk = 0;  ///< number of its first chunk; chunks do not cross extents
};

/// One preallocated, nameless file on a fast disk. Data is written in chunks; the XXH3 checksum and
/// the version (the step that wrote it) of every chunk stay in memory and are compared at each
/// read, so a lost, torn or stale write cannot pass. Different extents may be used by different
/// threads at once.
class SwapFile {
 public:
  /// A file of `bytes` in `directory`. Throws Error(io): see aio::File::create_anonymous.
  SwapFile(const std::filesystem::path& directory, Bytes bytes, const aio::QueueOptions& options);
  /// The same over a file and a queue of the caller's (tests put faulty ones here).
  SwapFile(aio::File file, std::unique_ptr<aio::Queue> queue);
  ~SwapFile();

  /// The next unused range; `bytes` is rounded up to 4 KiB. Throws Error(state) past the end.
  Extent allocate(Bytes bytes);

  /// Writes `data` (page-aligned, at most extent.bytes rounded up to whole pages) as `version`.
  /// Blocks. Throws Error(io) after all its transfers have ended.
  void write(const Extent& extent, HostBytes data, std::uint64_t version);

  /// Reads what was written last; same sizes. Throws Error(io) for a failed transfer and
  /// Error(state) when a checksum or the version is not what was written.
  void read(const Extent& extent, HostBytes data, std::uint64_t version);

  [[nodiscard]] Bytes capacity() const { return capacity_; }
  [[nodiscard]] Bytes allocated() const { return allocated_; }
  [[nodiscard]] aio::QueueCounters counters() const { return queue_->counters(); }
  /// "io_uring" or "threads".
  [[nodiscard]] std::string_view backend() const { return queue_->backend(); }

 private:
  struct Seal {
    std::uint64_t checksum = 0;
    std::uint64_t version = 0;
    bool written = false;
  };

  void verify(const Extent& extent, std::size_t chunk, HostBytes data, std::uint64_t version) const;

  Bytes capacity_;
  Bytes allocated_ = 0;
  aio::File file_;
  std::unique_ptr<aio::Queue> queue_;
  std::vector<Seal> seals_;  ///< by chunk number
};

}  // namespace ballast::state
