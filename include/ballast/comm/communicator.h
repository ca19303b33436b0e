#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "ballast/core/dtype.h"
#include "ballast/core/memory.h"
#include "ballast/device/device.h"

namespace ballast::comm {

/// How this process was started, according to the launcher's environment variables.
struct Launch {
  std::string launcher;          ///< "mpirun (Open MPI)", "mpiexec (PMI)", "srun"; "" without one
  std::uint32_t rank = 0;        ///< among all processes of the run
  std::uint32_t world = 1;       ///< number of processes
  std::uint32_t local_rank = 0;  ///< among the processes on this machine
  std::uint32_t local_world = 1;

  [[nodiscard]] bool first() const { return rank == 0; }
};

/// Reads the environment variables of mpirun (Open MPI, MPICH) and srun without calling MPI.
/// Without a launcher: rank 0 of 1. Throws Error(usage), one line with the variable, for values
/// that contradict each other or are not numbers.
Launch read_launch();

/// A launcher whose processes Ballast cannot join, because MPI does not connect them.
struct OtherLauncher {
  std::string name;       ///< "torchrun, accelerate or deepspeed", "flux", ...
  std::string variables;  ///< by which it was found: "RANK and WORLD_SIZE"
  std::uint32_t rank = 0;
  std::uint32_t world = 1;
};

/// Finds a launcher, other than those of read_launch(), that has started this process as one of
/// several: torchrun and programs like it, flux without PMI, jsrun, horovodrun. Empty if there is
/// none, if it has started one process, or if its variables are no numbers.
std::optional<OtherLauncher> find_other_launcher();

/// A sum over the terms of all members of a channel, element by element: ((first + t0) + t1) + ...
/// in fp32, rounded to `type` once. The terms are ordered by member and then by number, or in the
/// opposite order.
struct OrderedSum {
  std::uint64_t elements = 0;
  std::uint32_t terms = 1;       ///< per member
  DType term_type = DType::f32;  ///< fp32 or `type`
  DType type = DType::f32;       ///< type of the result and of `first`
  bool descending = false;

  /// Returns the size of the result.
  [[nodiscard]] Bytes bytes() const { return elements * size_of(type); }
  /// Returns the size of the terms of one member.
  [[nodiscard]] Bytes bytes_of_terms() const { return terms * elements * size_of(term_type); }
  /// Returns the device memory that a member of a channel of `members` needs for received terms.
  [[nodiscard]] Bytes scratch(std::uint32_t members) const;
};

/// Collectives on device buffers over the members of a channel, which are all or some ranks of a
/// run. Every member makes the same calls in the same order. On the CUDA device this also holds for
/// the calls of all channels of a rank together, and two threads must not call one channel at the
/// same time. Calls enqueue on `stream` and return; views must stay valid and unchanged until the
/// stream is synchronised. The call or the synchronisation throws Error(comm), for example after a
/// timeout, or Error(interrupted); no collective of the run works after that. All sizes are whole
/// pages (kPage) and the same on every member, except in all_to_all and sum_terms. Violated
/// preconditions throw Error(state) at the call.
///
/// With n members a shard is one of n equal parts of a buffer; part p belongs to member p. In a
/// channel of all ranks, rank r is member r unless the channel was made with another order.
///
/// Sums are deterministic: elements are added in rank order, independent of the members' order, in
/// fp32 and rounded to `type` once. So an all_reduce gives the same bits as a reduce_scatter
/// followed by an all_gather.
class Communicator {
 public:
  virtual ~Communicator() = default;
  Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  /// `whole` (n x shard.size() bytes) = the members' shards in order. `shard` may be this rank's
  /// shard of `whole`.
  virtual void all_gather(device::Stream& stream, ConstDeviceBytes shard, DeviceBytes whole) = 0;

  /// `shard` = the sum over members of this rank's shard in their `whole` (n x shard.size() bytes).
  /// `shard` may be this rank's shard of `whole`; the rest of `whole` is unchanged. `scratch`: at
  /// least n pages of device memory for received data; more, up to whole.size(), saves rounds.
  virtual void reduce_scatter(device::Stream& stream, DeviceBytes whole, DeviceBytes shard,
                              DType type, DeviceBytes scratch) = 0;

  /// `whole` = the sum over members. `scratch` as for reduce_scatter.
  virtual void all_reduce(device::Stream& stream, DeviceBytes whole, DType type,
                          DeviceBytes scratch) = 0;

  /// Sends part p of `input` to member p and receives part p of `output` from it. Parts are
  /// consecutive and may have any size, including 0, if sender and receiver agree.
  virtual void all_to_all(device::Stream& stream, ConstDeviceBytes input,
                          std::span<const Bytes> input_parts, DeviceBytes output,
                          std::span<const Bytes> output_parts) = 0;

  /// `out` = the sum of the terms of all members: `terms` holds this member's, one after the other.
  /// `first` has out's size and is equal on all members, or is empty. Each member adds a part of
  /// the elements, and all gather the rounded parts: with n members, a member receives (n - 1) / n
  /// of the size of its terms and of out. The buffers do not overlap. `scratch`: at least
  /// sum.scratch(n).
  virtual void sum_terms(device::Stream& stream, const OrderedSum& sum, ConstDeviceBytes terms,
                         ConstDeviceBytes first, DeviceBytes out, DeviceBytes scratch) = 0;

  /// `data` = member `root`'s `data`.
  virtual void broadcast(device::Stream& stream, DeviceBytes data, std::uint32_t root) = 0;
};

struct JoinOptions {
  /// Maximum time that a collective waits for other ranks before it fails; above 0.
  double timeout_seconds = 300.0;
  /// When set and true, waits end with Error(interrupted).
  const std::atomic<bool>* interrupted = nullptr;
  /// Over MPI, parts of an all_to_all that are larger are sent in pieces; at most 2^31 - 1.
  Bytes largest_message = Bytes{1} << 30U;
};

/// One process's view of all processes of a run. Its own collectives work on host memory and block.
/// Every rank makes them in the same order, from one thread at a time, which may differ from the
/// channels' thread. They throw as described at Communicator.
class Ranks {
 public:
  virtual ~Ranks() = default;
  Ranks() = default;
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;

  [[nodiscard]] virtual const Launch& launch() const = 0;
  [[nodiscard]] std::uint32_t rank() const { return launch().rank; }
  [[nodiscard]] std::uint32_t world() const { return launch().world; }
  /// Returns "self" or "mpi".
  [[nodiscard]] virtual std::string_view kind() const = 0;

  /// Makes a channel of all ranks for buffers of `device`, which must outlive it: over MPI on the
  /// host device (copies if there is one rank), over NCCL on the CUDA device. Collective. Throws
  /// Error(comm) if the program has no communicator for the device.
  std::unique_ptr<Communicator> make_communicator(device::Device& device) {
    return make_channel(device, {});
  }
  /// Makes a channel of the ranks `members`, including this one; rank members[p] is member p.
  /// Empty: all ranks in order. Collective over all ranks, each with the members of its channel.
  /// Also throws Error(state) for an invalid list.
  virtual std::unique_ptr<Communicator> make_channel(device::Device& device,
                                                     std::span<const std::uint32_t> members) = 0;

  /// `whole` (world x shard.size() bytes) = the shards of all ranks in order. A shard may have any
  /// size below 2 GiB.
  virtual void all_gather(ConstHostBytes shard, HostBytes whole) = 0;
  /// Returns rank 0's `text` on every rank.
  virtual std::string broadcast(std::string text) = 0;
  virtual void barrier() = 0;

  /// Ends all waits for other ranks in this process: current and later collectives throw
  /// Error(comm). Call it on a rank that has failed alone, before it ends its lanes, because the
  /// other ranks may wait for operations that it will not start. abort() follows. May be called
  /// from any thread.
  virtual void leave() = 0;

  /// Ends every process of the run immediately with `status`, for a rank that failed while others
  /// may wait for it. The caller reports the reason first.
  [[noreturn]] virtual void abort(int status) = 0;
};

/// Joins the run described by `launch`; with several ranks, once per process. A world of 1 does not
/// load MPI. MPI is finalized when the result and its channels are destroyed, in the thread that
/// joined. After a failed collective or during unwinding it is not finalized, because that would
/// wait for the other ranks; the launcher then ends them. Throws Error(comm) if there are several
/// ranks but mpi_refusal() is not empty, or if MPI contradicts `launch`.
std::unique_ptr<Ranks> join_ranks(const Launch& launch, const JoinOptions& options);

/// Returns why the program cannot join runs of several ranks, in one line; empty if it can. The
/// first call loads the program's MPI module, and with it an MPI library. mpi_file(): the module's
/// path, or "".
std::string mpi_refusal();
std::string mpi_file();

/// Returns why the program has no communicator for the CUDA device, in one line; empty if it has
/// one. The first call loads NCCL. nccl_file(): the library's path, or "".
std::string nccl_refusal();
std::string nccl_file();

}  // namespace ballast::comm
