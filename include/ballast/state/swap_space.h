#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "ballast/aio/queue.h"
#include "ballast/core/memory.h"
#include "ballast/state/swap_plan.h"

namespace ballast::state {

/// Value of `zeros_from` if no bytes are known to be zero.
inline constexpr Bytes kNoZeros = ~Bytes{0};

/// A running transfer between host memory and NVMe. Its memory must not be used until it has ended.
/// The destructor waits for all requests and ignores their errors.
class SwapTransfer {
 public:
  virtual ~SwapTransfer() = default;
  /// Blocks until all requests have ended; gives up on requests without an answer for
  /// abandon_seconds. Call it once. Throws Error(io) or Error(state) with stage, file, offset and
  /// length.
  virtual void finish() = 0;
};

/// Names for swap files that outlive their process. The file of path P is called `inside`-P in
/// `folder` or, if that is on another file system, `elsewhere`-P in its own directory.
struct SwapNames {
  std::filesystem::path folder;
  std::string inside;
  std::string elsewhere;  ///< no other run uses this name
  /// Is called for the directory of each file that is called `elsewhere`-P. It may throw.
  std::function<void(const std::filesystem::path& directory)> record = {};
};

/// The file of one path and its I/O queue.
struct SwapDevice {
  aio::File file;
  std::unique_ptr<aio::Queue> queue;  ///< declared after the file, which must outlive it
  std::filesystem::path directory = {};
};

/// Extents on disks, with one preallocated, unnamed file and one queue per path. The XXH3 checksum
/// and the version of every chunk stay in memory and are compared at each read, which detects lost,
/// torn, stale and corrupted writes. Several transfers may run at a time, also from different
/// threads, if each has another extent.
///
/// Blocks of the files are allocated at creation, so writes cannot run out of space. A segment
/// reads as zeros until it is written. So its first write moves nothing if the caller knows that
/// all of it is zero, like the initial moments of an optimizer.
class SwapSpace {
 public:
  /// Creates the files. `staging`: memory of most transfers, which is registered with the queues
  /// and must outlive this. Throws Error(io): see aio::File::create_anonymous and aio::make_queue.
  SwapSpace(const SwapPlan& plan, std::span<const HostBytes> staging);
  /// Uses the given new files and queues, one device per path.
  SwapSpace(Stripe stripe, std::vector<std::unique_ptr<SwapDevice>> devices);
  ~SwapSpace();
  SwapSpace(const SwapSpace&) = delete;
  SwapSpace& operator=(const SwapSpace&) = delete;

  /// Starts to write a whole extent (page-aligned `data` of its size) as `version`. `data` must not
  /// change until the transfer has ended. Bytes from `zeros_from` on are zero.
  /// SwapTransfer::finish() throws Error(io) for a failed request; reading the extent then fails.
  /// Throws Error(state) for another size.
  [[nodiscard]] std::unique_ptr<SwapTransfer> write(std::size_t extent, HostBytes data,
                                                    std::uint64_t version,
                                                    Bytes zeros_from = kNoZeros);

  /// Starts to read the last write, which must have ended. `ahead`: see aio::Request.
  /// SwapTransfer::finish() throws Error(io) for a failed request and Error(state) if a checksum or
  /// the version differs from the write; `data` is then invalid.
  [[nodiscard]] std::unique_ptr<SwapTransfer> read(std::size_t extent, HostBytes data,
                                                   std::uint64_t version, bool ahead = false);

  /// Returns the XXH3 of each chunk in the last write of the extent. Throws Error(state) without a
  /// write.
  [[nodiscard]] std::vector<std::uint64_t> checksums(std::size_t extent) const;
  /// Declares the content of an extent in an existing file, with the result of checksums() for it.
  void restore(std::size_t extent, std::span<const std::uint64_t> checksums, std::uint64_t version);

  /// Waits until all finished writes are on the disks. Throws Error(io).
  void sync() const;
  /// Names the files, so that they outlive this object. Replaces files with these names. Returns
  /// the names by path, or none if the files cannot be named. On failure, none keeps its new name.
  /// Throws Error(io) and the errors of SwapNames::record.
  [[nodiscard]] std::vector<std::filesystem::path> link(const SwapNames& names) const;

  [[nodiscard]] const Stripe& stripe() const { return stripe_; }
  /// Returns the layout of the files, without their names.
  [[nodiscard]] SwapImage image() const;
  /// Returns one entry per path.
  [[nodiscard]] std::vector<aio::QueueCounters> counters() const;
  /// Returns "io_uring", "threads", or "io_uring and threads".
  [[nodiscard]] const std::string& backend() const { return backend_; }

 private:
  struct Seal {
    std::uint64_t checksum = 0;
    std::uint64_t version = 0;
    bool written = false;  ///< whether the last write succeeded
    bool touched = false;  ///< whether a write was submitted; before that, the file reads as zeros
  };
  class ExtentTransfer;
  class Reading;
  class Writing;

  /// Names one file and adds its name to `paths`. Returns false if it cannot be named.
  bool link_one(std::size_t number, const SwapNames& names,
                std::vector<std::filesystem::path>& paths) const;
  [[nodiscard]] std::span<Seal> seals(std::size_t extent, const Segment& segment);
  [[nodiscard]] std::span<const Seal> seals(std::size_t extent) const;

  Stripe stripe_;
  std::vector<std::unique_ptr<SwapDevice>> devices_;  ///< by path; their addresses are registered
  std::string backend_;
  std::vector<Seal> seals_;  ///< by chunk number
};

}  // namespace ballast::state
