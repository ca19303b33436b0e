#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/core/threads.h"
#include "ballast/device/streams.h"

#include "src/comm/channel.h"
#include "src/comm/nccl_functions.h"
#include "src/comm/sum.h"
#include "src/device/cuda/runtime.h"

namespace ballast::comm {

namespace {

/// The first version in which all collectives may be nonblocking.
constexpr int kOldest = NCCL_VERSION(2, 18, 0);
constexpr int kNextMajor = NCCL_VERSION(3, 0, 0);

}  // namespace

void Nccl::find(device::Symbols& symbols) {
  symbols.find("ncclGetVersion", version);
  symbols.find("ncclGetErrorString", error_text);
  symbols.find("ncclGetLastError", last_error);
  symbols.find("ncclGetUniqueId", make_identifier);
  symbols.find("ncclCommInitRankConfig", join);
  symbols.find("ncclCommGetAsyncError", state);
  symbols.find("ncclCommFinalize", finalize);
  symbols.find("ncclCommDestroy", destroy);
  symbols.find("ncclCommAbort", abort);
  symbols.find("ncclGroupStart", start_group);
  symbols.find("ncclGroupEnd", end_group);
  symbols.find("ncclSend", send);
  symbols.find("ncclRecv", receive);
  symbols.find("ncclAllGather", all_gather);
  symbols.find("ncclBroadcast", broadcast);
}

std::string Nccl::refusal() const {
  int found = 0;
  if (version(&found) != ncclSuccess) return "its version cannot be read";
  if (found >= kOldest && found < kNextMajor) return "";
  return fmt::format("it is version {}.{}, but this program needs version 2.18 or a newer 2",
                     found / 10000, found / 100 % 100);
}

LoadedNccl load_nccl(std::span<const std::string> names) {
  return device::load_library<Nccl>(names, "install NCCL or add its folder to LD_LIBRARY_PATH");
}

namespace {

constexpr Collective kSetUp = {"setting up a channel", 0};
constexpr Collective kEnd = {"ending a channel", 0};

/// Returns whether `code` is not a failure: nonblocking calls return "in progress".
bool accepted(ncclResult_t code) {
  return code == ncclSuccess || code == ncclInProgress;
}

/// One nonblocking NCCL communicator. Its state is polled, so that waits for other ranks respect
/// CollectiveTimeout. A failed wait aborts the communicator, which ends its kernels on the device.
/// One thread at a time starts collectives, while others wait for earlier ones.
class NcclChannel {
 public:
  /// Joins the members on the calling thread's current device. Collective. Throws Error(comm).
  NcclChannel(Ranks& ranks, const Members& members, std::shared_ptr<CollectiveTimeout> timeout)
      : timeout_(std::move(timeout)) {
    // Place 0 of each channel creates its identifier; every rank gathers all of them.
    ncclUniqueId own = {};
    if (members.place() == 0) require(nccl().make_identifier(&own), kSetUp);
    std::vector<ncclUniqueId> all(ranks.world());
    ranks.all_gather(std::as_bytes(std::span(&own, 1)), std::as_writable_bytes(std::span(all)));
    const ncclUniqueId id = all[members.first_rank()];

    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    try {
      timeout_->check(kSetUp, 0.0);
      require(nccl().join(&communicator_, static_cast<int>(members.count()), id,
                          static_cast<int>(members.place()), &config),
              kSetUp);
      settle(kSetUp);
    } catch (...) {
      abort();
      throw;
    }
  }
  /// Ends the communicator together with the other ranks; aborts it after a failure.
  ~NcclChannel() {
    if (communicator_ == nullptr) return;
    try {
      if (timeout_->ends_quietly()) close();
    } catch (const Error&) {
      // The run's results are complete; the abort below cleans up.
    }
    if (communicator_ != nullptr) abort();
  }
  NcclChannel(const NcclChannel&) = delete;
  NcclChannel& operator=(const NcclChannel&) = delete;

  [[nodiscard]] ncclComm_t get() const { return communicator_; }

  /// Runs `calls`, which enqueue on a stream and return the first code that is not accepted, as one
  /// group. The first collectives of a channel may wait here for other ranks. Throws Error(comm) or
  /// Error(interrupted).
  void run_group(const Collective& what, const std::function<ncclResult_t()>& calls) {
    try {
      const std::scoped_lock lock(mutex_);
      timeout_->check(what, 0.0);
      expects(communicator_ != nullptr, "a collective was started on a channel that has ended");
      require(nccl().start_group(), what);
      const ncclResult_t made = calls();
      const ncclResult_t ended = nccl().end_group();  // also after a failure, to leave the group
      require(made, what);
      require(ended, what);
      settle(what);
    } catch (...) {
      abort();
      throw;
    }
  }

  /// Polls the work on the device. Throws Error(comm) if it failed or timed out,
  /// Error(interrupted).
  void poll(const Collective& what, double waited_seconds) {
    try {
      // A thread that starts a collective looks at the state itself.
      if (const std::unique_lock lock(mutex_, std::try_to_lock);
          lock.owns_lock() && communicator_ != nullptr) {
        ncclResult_t state = ncclSuccess;
        require(nccl().state(communicator_, &state), what);
        require(state, what);
      }
      timeout_->check(what, waited_seconds);
    } catch (...) {
      abort();
      throw;
    }
  }

 private:
  void require(ncclResult_t code, const Collective& what) const {
    if (accepted(code)) return;
    // The last error belongs to the whole process, but is the only source of details.
    const char* const last = nccl().last_error(communicator_);
    std::string text = nccl().error_text(code);
    if (last != nullptr && *last != '\0') text += fmt::format(": {}", last);
    std::replace(text.begin(), text.end(), '\n', ' ');
    throw Error(ErrorCategory::comm, fmt::format("{}: NCCL: {}", to_text(what), text));
  }

  void settle(const Collective& what) {
    Polling polling(Polling::Worker::device);
    while (true) {
      ncclResult_t state = ncclSuccess;
      require(nccl().state(communicator_, &state), what);
      require(state, what);
      if (state == ncclSuccess) return;
      timeout_->check(what, polling.seconds());
      polling.pause();
    }
  }

  void close() {
    require(nccl().finalize(communicator_), kEnd);
    settle(kEnd);
    require(nccl().destroy(std::exchange(communicator_, nullptr)), kEnd);
  }

  /// Ignores failures: the process ends, and the driver frees its resources.
  void abort() {
    timeout_->give_up();  // ends the waits of a thread that starts a collective
    const std::scoped_lock lock(mutex_);
    if (communicator_ != nullptr) nccl().abort(std::exchange(communicator_, nullptr));
  }

  std::shared_ptr<CollectiveTimeout> timeout_;
  std::mutex mutex_;  ///< guards communicator_
  ncclComm_t communicator_ = nullptr;
};

/// Collectives only move bytes of any element type.
constexpr ncclDataType_t kByte = ncclUint8;

/// NCCL only moves data, and a kernel of this program adds it, because the order of NCCL's sums
/// depends on the algorithm that it chooses.
class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(Ranks& ranks, Members members, std::shared_ptr<CollectiveTimeout> timeout)
      : channel_(std::make_shared<NcclChannel>(ranks, members, std::move(timeout))),
        members_(std::move(members)),
        rank_(members_.place()),
        world_(members_.count()) {}

  void all_gather(device::Stream& stream, ConstDeviceBytes shard, DeviceBytes whole) override {
    check_all_gather(shard, whole, world_);
    gather(device::as_cuda(stream), {"all_gather", whole.size()}, shard, whole);
  }
  void reduce_scatter(device::Stream& stream, DeviceBytes whole, DeviceBytes shard, DType type,
                      DeviceBytes scratch) override {
    check_reduce_scatter(whole, shard, scratch, world_);
    reduce(device::as_cuda(stream), {"reduce_scatter", whole.size()}, whole, shard.raw(), type,
           scratch);
  }
  void all_reduce(device::Stream& stream, DeviceBytes whole, DType type,
                  DeviceBytes scratch) override {
    check_all_reduce(whole, scratch, world_);
    const Collective what = {"all_reduce", whole.size()};
    device::CudaStream& cuda = device::as_cuda(stream);
    const Shards shards(whole.size(), world_);
    reduce(cuda, what, whole, whole.raw() + shards.at(rank_, 0) * kPage, type, scratch);
    if (whole.size() % (world_ * kPage) == 0) {
      const Bytes size = whole.size() / world_;
      gather(cuda, what, whole.subview(rank_ * size, size), whole);
    } else {
      gather_unequal(cuda, what, whole);
    }
  }
  void all_to_all(device::Stream& stream, ConstDeviceBytes input,
                  std::span<const Bytes> input_parts, DeviceBytes output,
                  std::span<const Bytes> output_parts) override {
    check_all_to_all(input, input_parts, output, output_parts, world_);
    run(device::as_cuda(stream), {"all_to_all", output.size()}, [&](cudaStream_t queue) {
      Bytes sent = 0;
      Bytes received = 0;
      for (std::uint32_t member = 0; member < world_; ++member) {
        const ncclResult_t code =
            exchange_with(member, queue, input.subview(sent, input_parts[member]),
                          output.subview(received, output_parts[member]));
        if (!accepted(code)) return code;
        sent += input_parts[member];
        received += output_parts[member];
      }
      return ncclSuccess;
    });
  }
  void sum_terms(device::Stream& stream, const OrderedSum& sum, ConstDeviceBytes terms,
                 ConstDeviceBytes first, DeviceBytes out, DeviceBytes scratch) override {
    check_sum_terms(sum, terms, first, out, scratch, world_);
    device::CudaStream& cuda = device::as_cuda(stream);
    const Collective what = {"sum_terms", out.size()};
    const SumParts parts(sum.elements, world_);
    if (world_ > 1) exchange_terms(cuda, what, sum, terms, scratch);
    const Bytes begin = parts.first(rank_) * size_of(sum.type);
    const OrderedTerms ordered = {.first = first.empty() ? nullptr : first.raw() + begin,
                                  .own = terms.raw() + parts.first(rank_) * size_of(sum.term_type),
                                  .own_distance = sum.elements,
                                  .received = scratch.raw(),
                                  .received_distance = parts.longest(),
                                  .member = rank_,
                                  .members = world_,
                                  .per_member = sum.terms,
                                  .descending = sum.descending};
    const int code = enqueue_ordered_sum(cuda.native(), ordered, out.raw() + begin,
                                         parts.count(rank_), sum.term_type, sum.type);
    device::check_cuda(static_cast<cudaError_t>(code), what.name);
    if (world_ > 1) gather_parts_of_sum(cuda, what, sum, out);
  }
  void broadcast(device::Stream& stream, DeviceBytes data, std::uint32_t root) override {
    check_broadcast(data, root, world_);
    device::CudaStream& cuda = device::as_cuda(stream);
    run(cuda, {"broadcast", data.size()}, [&](cudaStream_t queue) {
      return nccl().broadcast(data.raw(), data.raw(), data.size(), kByte, static_cast<int>(root),
                              channel_->get(), queue);
    });
  }

 private:
  /// Runs `calls` as one group. Later waits for the stream poll the channel.
  template <class Calls>
  void run(device::CudaStream& stream, const Collective& what, const Calls& calls) {
    const cudaStream_t queue = stream.native();
    channel_->run_group(what, [&] { return calls(queue); });
    stream.set_watch(channel_.get(), [channel = channel_, what](double waited_seconds) {
      channel->poll(what, waited_seconds);
    });
  }

  void gather(device::CudaStream& stream, const Collective& what, ConstDeviceBytes shard,
              DeviceBytes whole) {
    run(stream, what, [&](cudaStream_t queue) {
      return nccl().all_gather(shard.raw(), whole.raw(), shard.size(), kByte, channel_->get(),
                               queue);
    });
  }

  /// Gathers every rank's shard of `whole`; ncclAllGather supports only equal shards.
  void gather_unequal(device::CudaStream& stream, const Collective& what, DeviceBytes whole) {
    const Shards shards(whole.size(), world_);
    run(stream, what, [&](cudaStream_t queue) {
      for (std::uint32_t rank = 0; rank < world_; ++rank) {
        const Bytes bytes = shards.count(rank, 0, shards.longest()) * kPage;
        std::byte* const start = whole.raw() + shards.at(rank, 0) * kPage;
        if (bytes == 0) continue;
        const ncclResult_t code = nccl().broadcast(start, start, bytes, kByte,
                                                   static_cast<int>(rank), channel_->get(), queue);
        if (!accepted(code)) return code;
      }
      return ncclSuccess;
    });
  }

  /// `out` = the sum over ranks of this rank's shard in their `whole`. Each round exchanges the
  /// pages of every shard that fit in `scratch` for all ranks, then adds them in rank order.
  void reduce(device::CudaStream& stream, const Collective& what, DeviceBytes whole, std::byte* out,
              DType type, DeviceBytes scratch) {
    const Shards shards(whole.size(), world_);
    const std::uint64_t piece = scratch.size() / kPage / world_;
    for (std::uint64_t page = 0; page < shards.longest(); page += piece) {
      if (world_ > 1) exchange(stream, what, whole, scratch, page, piece);
      const SumTerms terms = {.own = whole.raw() + shards.at(rank_, page) * kPage,
                              .others = scratch.raw(),
                              .distance = piece * kPage,
                              .turn = members_.turn(rank_),
                              .count = world_};
      const int code = enqueue_sum(stream.native(), terms, out + page * kPage,
                                   shards.count(rank_, page, piece) * kPage, type);
      device::check_cuda(static_cast<cudaError_t>(code), what.name);
    }
  }

  /// Sends pages [page, page + piece) of each rank's shard to that rank. `scratch` receives the
  /// others' pages of this rank's shard, `piece` pages per rank, in the order of the sum.
  void exchange(device::CudaStream& stream, const Collective& what, DeviceBytes whole,
                DeviceBytes scratch, std::uint64_t page, std::uint64_t piece) {
    const Shards shards(whole.size(), world_);
    const Bytes received = shards.count(rank_, page, piece) * kPage;
    run(stream, what, [&](cudaStream_t queue) {
      for (std::uint32_t rank = 0; rank < world_; ++rank) {
        if (rank == rank_) continue;  // the sum reads it in place
        const ncclResult_t code = exchange_with(
            rank, queue,
            {whole.raw() + shards.at(rank, page) * kPage, shards.count(rank, page, piece) * kPage},
            {scratch.raw() + members_.turn(rank) * piece * kPage, received});
        if (!accepted(code)) return code;
      }
      return ncclSuccess;
    });
  }

  /// Sends each member its part of this member's terms, and receives theirs, by member and term.
  void exchange_terms(device::CudaStream& stream, const Collective& what, const OrderedSum& sum,
                      ConstDeviceBytes terms, DeviceBytes scratch) {
    const Bytes width = size_of(sum.term_type);
    const SumParts parts(sum.elements, world_);
    run(stream, what, [&](cudaStream_t queue) {
      for (std::uint32_t i = 0; i < world_ * sum.terms; ++i) {
        const std::uint32_t member = i / sum.terms;
        if (member == rank_) continue;  // the sum reads it in place
        const ConstDeviceBytes term =
            terms.subview(i % sum.terms * sum.elements * width, sum.elements * width);
        const ncclResult_t code = exchange_with(
            member, queue, parts.of(term, member, width),
            scratch.subview(parts.received_at(member, i % sum.terms, sum.terms) * width,
                            parts.count(rank_) * width));
        if (!accepted(code)) return code;
      }
      return ncclSuccess;
    });
  }

  void gather_parts_of_sum(device::CudaStream& stream, const Collective& what,
                           const OrderedSum& sum, DeviceBytes out) {
    const Bytes width = size_of(sum.type);
    const SumParts parts(sum.elements, world_);
    run(stream, what, [&](cudaStream_t queue) {
      for (std::uint32_t member = 0; member < world_; ++member) {
        if (member == rank_) continue;
        const ncclResult_t code =
            exchange_with(member, queue, parts.of(out, rank_, width), parts.of(out, member, width));
        if (!accepted(code)) return code;
      }
      return ncclSuccess;
    });
  }

  ncclResult_t exchange_with(std::uint32_t rank, cudaStream_t queue, ConstDeviceBytes sent,
                             DeviceBytes received) const {
    const int peer = static_cast<int>(rank);
    if (!sent.empty()) {
      const ncclResult_t code =
          nccl().send(sent.raw(), sent.size(), kByte, peer, channel_->get(), queue);
      if (!accepted(code)) return code;
    }
    if (received.empty()) return ncclSuccess;
    return nccl().receive(received.raw(), received.size(), kByte, peer, channel_->get(), queue);
  }

  std::shared_ptr<NcclChannel> channel_;
  Members members_;
  std::uint32_t rank_;   ///< place among the members; rank in the NCCL communicator
  std::uint32_t world_;  ///< number of members
};

/// NCCL does not support two ranks on one GPU and may hang.
void refuse_shared_gpus(Ranks& ranks) {
  int ordinal = 0;
  cudaDeviceProp properties = {};
  device::check_cuda(cudaGetDevice(&ordinal), "getting the current CUDA device");
  device::check_cuda(cudaGetDeviceProperties(&properties, ordinal), "getting the GPU's properties");
  constexpr std::size_t kSize = sizeof properties.uuid.bytes;
  std::vector<std::byte> names(ranks.world() * kSize);
  ranks.all_gather(std::as_bytes(std::span(properties.uuid.bytes)), names);
  for (std::size_t first = 0; first < ranks.world(); ++first) {
    for (std::size_t second = first + 1; second < ranks.world(); ++second) {
      if (std::memcmp(&names[first * kSize], &names[second * kSize], kSize) != 0) continue;
      throw Error(ErrorCategory::comm,
                  fmt::format("ranks {} and {} use the same GPU; start at most one process per GPU",
                              first, second));
    }
  }
}

}  // namespace

std::unique_ptr<Communicator> make_nccl_communicator(
    Ranks& ranks, const Members& members, device::Device& device,
    const std::shared_ptr<CollectiveTimeout>& timeout) {
  static_cast<void>(nccl());  // throws without the library
  // NCCL uses the calling thread's current device; native() makes the stream's device current.
  const auto stream = device.make_stream("nccl");
  static_cast<void>(device::as_cuda(*stream).native());
  refuse_shared_gpus(ranks);
  device::check_cuda(static_cast<cudaError_t>(load_sum()), "loading the sum kernels");
  return std::make_unique<NcclCommunicator>(ranks, members, timeout);
}

}  // namespace ballast::comm
