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
#include "ballast/device/streams.h"

// Shared by all communicators: members of a channel, shards of a buffer, the timeout, and argument
// checks.
namespace ballast::comm {

/// The members of a channel. Each has a place in the channel and a rank in the run.
class Members {
 public:
  /// `ranks` by place; they include `rank`. Empty: all `world` ranks in order. Throws Error(state)
  /// for an invalid list.
  Members(std::span<const std::uint32_t> ranks, std::uint32_t rank, std::uint32_t world);

  [[nodiscard]] std::uint32_t count() const { return static_cast<std::uint32_t>(ranks_.size()); }
  /// Returns this rank's place.
  [[nodiscard]] std::uint32_t place() const { return place_; }
  /// Returns the rank at place 0, which identifies the channel.
  [[nodiscard]] std::uint32_t first_rank() const { return ranks_.front(); }
  /// Returns whether the members are all ranks in order.
  [[nodiscard]] bool all_in_order() const { return all_in_order_; }
  /// Returns the places in rank order, which is the order of sums.
  [[nodiscard]] std::span<const std::uint32_t> by_rank() const { return by_rank_; }
  /// Returns the index of a place in by_rank().
  [[nodiscard]] std::uint32_t turn(std::uint32_t place) const { return turns_[place]; }

 private:
  std::vector<std::uint32_t> ranks_;
  std::vector<std::uint32_t> by_rank_;
  std::vector<std::uint32_t> turns_;
  std::uint32_t place_ = 0;
  bool all_in_order_ = false;
};

/// A buffer split into one shard of whole pages per rank. The last shards may be shorter or empty.
class Shards {
 public:
  Shards(Bytes bytes, std::uint32_t world)
      : pages_(bytes / kPage), longest_((pages_ + world - 1) / world) {}

  [[nodiscard]] std::uint64_t longest() const { return longest_; }
  /// Returns the index in the buffer of page `page` of rank's shard.
  [[nodiscard]] std::uint64_t at(std::uint32_t rank, std::uint64_t page) const {
    return std::min(rank * longest_ + page, pages_);
  }
  /// Returns how many pages of [page, page + count) exist in rank's shard.
  [[nodiscard]] std::uint64_t count(std::uint32_t rank, std::uint64_t page,
                                    std::uint64_t count) const {
    return at(rank, std::min(page + count, longest_)) - at(rank, page);
  }

 private:
  std::uint64_t pages_;
  std::uint64_t longest_;
};

/// The part of the elements of an OrderedSum that each member adds. Parts begin at multiples of a
/// cache line; the last ones may be shorter or empty.
class SumParts {
 public:
  SumParts(std::uint64_t elements, std::uint32_t members)
      : elements_(elements),
        longest_(round_up((elements + members - 1) / members, std::uint64_t{kCacheLine})) {}

  [[nodiscard]] std::uint64_t longest() const { return longest_; }
  [[nodiscard]] std::uint64_t first(std::uint32_t member) const {
    return std::min(member * longest_, elements_);
  }
  [[nodiscard]] std::uint64_t count(std::uint32_t member) const {
    return first(member + 1) - first(member);
  }
  /// Returns the place of received term `number` of `member`, who sends `terms`, in elements of the
  /// scratch memory.
  [[nodiscard]] std::uint64_t received_at(std::uint32_t member, std::uint32_t number,
                                          std::uint32_t terms) const {
    return (std::uint64_t{member} * terms + number) * longest_;
  }
  /// Returns the part of `member` in an array of elements of `width` bytes.
  template <class T>
  [[nodiscard]] DeviceView<T> of(DeviceView<T> array, std::uint32_t member, Bytes width) const {
    return array.subview(first(member) * width, count(member) * width);
  }

 private:
  std::uint64_t elements_;
  std::uint64_t longest_;
};

/// A collective, for messages.
struct Collective {
  std::string_view name;
  Bytes bytes;  ///< size of the whole buffer
};

/// Returns "all_gather of 3.00 MiB", or only the name for 0 bytes.
std::string to_text(const Collective& what);

/// Timeout of all collectives of this process, over MPI and NCCL. Once a collective has failed,
/// those in other threads end too, and no new one starts. Thread-safe.
class CollectiveTimeout {
 public:
  explicit CollectiveTimeout(const JoinOptions& options);

  /// Throws if a wait must end after `waited_seconds`: Error(interrupted), or Error(comm) if
  /// another collective has failed or the timeout has passed.
  void check(const Collective& what, double waited_seconds) const;

  /// Makes every later check() throw. The exception being handled at the first call, if any, is
  /// reported as the cause.
  void give_up();
  /// Returns whether teardown may wait for the other ranks: no collective has failed, and this
  /// thread is not unwinding because of an exception thrown since this object was made.
  [[nodiscard]] bool ends_quietly() const;

 private:
  JoinOptions options_;
  int exceptions_at_start_;
  std::atomic<bool> broken_ = false;
  mutable std::mutex mutex_;
  std::string cause_;  ///< message of the first failure; "" if unknown
};

// Check the preconditions documented at Communicator. Throw Error(state).
void check_all_gather(ConstDeviceBytes shard, DeviceBytes whole, std::uint32_t world);
void check_reduce_scatter(DeviceBytes whole, DeviceBytes shard, DeviceBytes scratch,
                          std::uint32_t world);
void check_all_reduce(DeviceBytes whole, DeviceBytes scratch, std::uint32_t world);
void check_all_to_all(ConstDeviceBytes input, std::span<const Bytes> input_parts,
                      DeviceBytes output, std::span<const Bytes> output_parts, std::uint32_t world);
void check_sum_terms(const OrderedSum& sum, ConstDeviceBytes terms, ConstDeviceBytes first,
                     DeviceBytes out, DeviceBytes scratch, std::uint32_t world);
void check_broadcast(DeviceBytes data, std::uint32_t root, std::uint32_t world);

/// Adds the part of `member`, one of `members`, on the host device: its own terms in place, and
/// those of the others, which `scratch` has received.
void add_own_part(const OrderedSum& sum, std::uint32_t members, std::uint32_t member,
                  ConstDeviceBytes terms, ConstDeviceBytes first, DeviceBytes out,
                  DeviceBytes scratch);

using device::as_host;

/// Throws Error(comm) unless `device` is the host device.
void check_host_device(const device::Device& device);

/// Joins a run of several processes over MPI. Throws Error(comm); see join_ranks.
std::unique_ptr<Ranks> make_mpi_ranks(const Launch& launch, const JoinOptions& options);

/// Makes an NCCL channel of `members` for the CUDA device `device`. `ranks` is used only during the
/// call. Collective. Throws Error(comm), also if the program was built without NCCL.
std::unique_ptr<Communicator> make_nccl_communicator(
    Ranks& ranks, const Members& members, device::Device& device,
    const std::shared_ptr<CollectiveTimeout>& timeout);

}  // namespace ballast::comm
