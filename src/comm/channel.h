#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ballast/comm/communicator.h"
#include "ballast/core/units.h"
#include "ballast/device/host_stream.h"

// Shared by all communicators: the members of a channel, the shards of a buffer, the timeout, and
// checks of arguments.
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

/// A buffer cut into one shard per rank, in whole pages. Shards are equal but for the last ones,
/// which may be shorter or empty.
class Shards {
 public:
  Shards(Bytes bytes, std::uint32_t world)
      : pages_(bytes / kPage), longest_((pages_ + world - 1) / world) {}

  [[nodiscard]] std::uint64_t longest() const { return longest_; }
  /// Where page `page` of rank's shard is, from the beginning of the buffer.
  [[nodiscard]] std::uint64_t at(std::uint32_t rank, std::uint64_t page) const {
    return std::min(rank * longest_ + page, pages_);
  }
  /// How many of the pages [page, page + count) of rank's shard there are.
  [[nodiscard]] std::uint64_t count(std::uint32_t rank, std::uint64_t page,
                                    std::uint64_t count) const {
    return at(rank, std::min(page + count, longest_)) - at(rank, page);
  }

 private:
  std::uint64_t pages_;
  std::uint64_t longest_;
};

/// A collective, for messages.
struct Collective {
  std::string_view name;
  Bytes bytes;  ///< of the whole buffer
};

/// "all_gather of 3.00 MiB".
std::string to_text(const Collective& what);

/// How long the collectives of this process wait for other ranks, whatever carries them. Once one
/// was given up, those in other threads end too and nothing new starts. Thread-safe.
class CollectiveTimeout {
 public:
  explicit CollectiveTimeout(const JoinOptions& options);

  /// Throws when a wait of so many seconds must end: Error(interrupted), or Error(comm) when
  /// another collective failed or the timeout has passed.
  void check(const Collective& what, double waited_seconds) const;

  /// From now on check() throws. The exception that is being handled here, if any, is named as the
  /// cause: the first one that was.
  void give_up();
  /// Whether what is left to do can wait for the other ranks: nothing was given up, and no
  /// exception is under way in this thread that was not when this object was made.
  [[nodiscard]] bool ends_quietly() const;

 private:
  JoinOptions options_;
  int exceptions_at_start_;
  std::atomic<bool> broken_ = false;
  mutable std::mutex mutex_;
  std::string cause_;  ///< of the first failure, "" when that is not known
};

// The preconditions that Communicator documents; Error(state) when one is broken.
void check_all_gather(ConstDeviceBytes shard, DeviceBytes whole, std::uint32_t world);
void check_reduce_scatter(DeviceBytes whole, DeviceBytes shard, DType type, DeviceBytes scratch,
                          std::uint32_t world);
void check_all_reduce(DeviceBytes whole, DType type, DeviceBytes scratch, std::uint32_t world);
void check_broadcast(DeviceBytes data, std::uint32_t root, std::uint32_t world);

using device::as_host;

/// Throws Error(comm) unless `device` is the host device.
void check_host_device(const device::Device& device);

/// A run of several processes over MPI. Throws Error(comm): see join_ranks.
std::unique_ptr<Ranks> make_mpi_ranks(const Launch& launch, const JoinOptions& options);

/// A channel of `members` of `ranks` for the CUDA device `device` over NCCL; they find each other
/// through `ranks`, which may be gone afterwards. Collective. Throws Error(comm), also when the
/// program was built without NCCL.
std::unique_ptr<Communicator> make_nccl_communicator(
    Ranks& ranks, const Members& members, device::Device& device,
    const std::shared_ptr<CollectiveTimeout>& timeout);

}  // namespace ballast::comm
