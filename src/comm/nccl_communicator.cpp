#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <nccl.h>

#include "ballast/core/error.h"
#include "ballast/device/cuda_stream.h"

#include "src/comm/checks.h"
#include "src/comm/factories.h"
#include "src/comm/nccl_channel.h"
#include "src/comm/nccl_sum.h"
#include "src/comm/parts.h"
#include "src/device/cuda/errors.h"

namespace ballast::comm {
namespace {

/// Bytes as NCCL's elements: what is only moved has no type.
constexpr ncclDataType_t kByte = ncclUint8;

/// NCCL moves, a kernel of this program adds: in NCCL's own sums the order depends on the
/// algorithm that it chooses.
class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(Ranks& ranks, Members members, std::shared_ptr<Patience> patience)
      : channel_(std::make_shared<NcclChannel>(ranks, members, std::move(patience))),
        members_(std::move(members)),
        rank_(members_.place()),
        world_(members_.count()) {}

  void all_gather(device::Stream& stream, ConstDeviceBytes part, DeviceBytes whole) override {
    check_all_gather(part, whole, world_);
    gather(device::as_cuda(stream), {"all_gather", whole.size()}, part, whole);
  }
  void reduce_scatter(device::Stream& stream, DeviceBytes whole, DeviceBytes part, DType type,
                      DeviceBytes scratch) override {
    check_reduce_scatter(whole, part, type, scratch, world_);
    reduce(device::as_cuda(stream), {"reduce_scatter", whole.size()}, whole, part.raw(), type,
           scratch);
  }
  void all_reduce(device::Stream& stream, DeviceBytes whole, DType type,
                  DeviceBytes scratch) override {
    check_all_reduce(whole, type, scratch, world_);
    const Collective what = {"all_reduce", whole.size()};
    device::CudaStream& cuda = device::as_cuda(stream);
    const Parts parts(whole.size(), world_);
    reduce(cuda, what, whole, whole.raw() + parts.at(rank_, 0) * kPage, type, scratch);
    if (whole.size() % (world_ * kPage) == 0) {
      const Bytes size = whole.size() / world_;
      gather(cuda, what, whole.subview(rank_ * size, size), whole);
    } else {
      gather_unequal(cuda, what, whole);
    }
  }
  void broadcast(device::Stream& stream, DeviceBytes data, std::uint32_t root) override {
    check_broadcast(data, root, world_);
    device::CudaStream& cuda = device::as_cuda(stream);
    run(cuda, {"broadcast", data.size()}, [&](cudaStream_t queue) {
      return ncclBroadcast(data.raw(), data.raw(), data.size(), kByte, static_cast<int>(root),
                           channel_->get(), queue);
    });
  }

 private:
  /// `calls` as one group; from then on whoever waits for the stream looks after the channel.
  template <class Calls>
  void run(device::CudaStream& stream, const Collective& what, const Calls& calls) {
    const cudaStream_t queue = stream.native();
    channel_->run_group(what, [&] { return calls(queue); });
    stream.set_watch(channel_.get(), [channel = channel_, what](double waited_seconds) {
      channel->look(what, waited_seconds);
    });
  }

  void gather(device::CudaStream& stream, const Collective& what, ConstDeviceBytes part,
              DeviceBytes whole) {
    run(stream, what, [&](cudaStream_t queue) {
      return ncclAllGather(part.raw(), whole.raw(), part.size(), kByte, channel_->get(), queue);
    });
  }

  /// Every rank's part of `whole` from that rank; NCCL's all-gather takes equal parts only.
  void gather_unequal(device::CudaStream& stream, const Collective& what, DeviceBytes whole) {
    const Parts parts(whole.size(), world_);
    run(stream, what, [&](cudaStream_t queue) {
      for (std::uint32_t rank = 0; rank < world_; ++rank) {
        const Bytes bytes = parts.count(rank, 0, parts.longest()) * kPage;
        std::byte* const start = whole.raw() + parts.at(rank, 0) * kPage;
        if (bytes == 0) continue;
        const ncclResult_t code = ncclBroadcast(start, start, bytes, kByte, static_cast<int>(rank),
                                                channel_->get(), queue);
        if (!accepted(code)) return code;
      }
      return ncclSuccess;
    });
  }

  /// `out` = the sum over ranks of this rank's part of their `whole`. In rounds: as much of every
  /// part as the scratch holds from all ranks is exchanged, then added up in rank order.
  void reduce(device::CudaStream& stream, const Collective& what, DeviceBytes whole, std::byte* out,
              DType type, DeviceBytes scratch) {
    const Parts parts(whole.size(), world_);
    const std::uint64_t piece = scratch.size() / kPage / world_;
    for (std::uint64_t page = 0; page < parts.longest(); page += piece) {
      if (world_ > 1) exchange(stream, what, whole, scratch, page, piece);
      const SumTerms terms = {.own = whole.raw() + parts.at(rank_, page) * kPage,
                              .others = scratch.raw(),
                              .distance = piece * kPage,
                              .turn = members_.turn(rank_),
                              .count = world_};
      const int code = enqueue_sum(stream.native(), terms, out + page * kPage,
                                   parts.count(rank_, page, piece) * kPage, type);
      device::check_cuda(static_cast<cudaError_t>(code), what.name);
    }
  }

  /// Pages [page, page + piece) of rank's part go to it; what the others have of this rank's
  /// arrives in `scratch`, `piece` pages for each rank, in the order in which they are added.
  void exchange(device::CudaStream& stream, const Collective& what, DeviceBytes whole,
                DeviceBytes scratch, std::uint64_t page, std::uint64_t piece) {
    const Parts parts(whole.size(), world_);
    const Bytes arriving = parts.count(rank_, page, piece) * kPage;
    run(stream, what, [&](cudaStream_t queue) {
      for (std::uint32_t rank = 0; rank < world_; ++rank) {
        if (rank == rank_) continue;  // the sum reads it where it is
        const ncclResult_t code = exchange_with(
            rank, queue,
            {whole.raw() + parts.at(rank, page) * kPage, parts.count(rank, page, piece) * kPage},
            {scratch.raw() + members_.turn(rank) * piece * kPage, arriving});
        if (!accepted(code)) return code;
      }
      return ncclSuccess;
    });
  }

  /// Nothing to send is nothing to receive at the other end.
  ncclResult_t exchange_with(std::uint32_t rank, cudaStream_t queue, ConstDeviceBytes leaving,
                             DeviceBytes arriving) const {
    const int peer = static_cast<int>(rank);
    if (!leaving.empty()) {
      const ncclResult_t code =
          ncclSend(leaving.raw(), leaving.size(), kByte, peer, channel_->get(), queue);
      if (!accepted(code)) return code;
    }
    if (arriving.empty()) return ncclSuccess;
    return ncclRecv(arriving.raw(), arriving.size(), kByte, peer, channel_->get(), queue);
  }

  std::shared_ptr<NcclChannel> channel_;
  Members members_;
  std::uint32_t rank_;   ///< this one's place among the members, which is its rank in NCCL
  std::uint32_t world_;  ///< number of members
};

/// NCCL is not made for two ranks on one GPU: it may hang.
void refuse_shared_gpus(Ranks& ranks) {
  int ordinal = 0;
  cudaDeviceProp properties = {};
  device::check_cuda(cudaGetDevice(&ordinal), "asking for the current CUDA device");
  device::check_cuda(cudaGetDeviceProperties(&properties, ordinal), "asking for the name of a GPU");
  constexpr std::size_t kSize = sizeof properties.uuid.bytes;
  std::vector<std::byte> names(ranks.world() * kSize);
  ranks.all_gather(std::as_bytes(std::span(properties.uuid.bytes)), names);
  for (std::size_t first = 0; first < ranks.world(); ++first) {
    for (std::size_t second = first + 1; second < ranks.world(); ++second) {
      if (std::memcmp(&names[first * kSize], &names[second * kSize], kSize) != 0) continue;
      throw Error(
          ErrorCategory::comm,
          fmt::format("ranks {} and {} have the same GPU; start one process for each GPU of "
                      "a machine",
                      first, second));
    }
  }
}

}  // namespace

std::string nccl_refusal() {
  return "";
}

std::unique_ptr<Communicator> make_nccl_communicator(Ranks& ranks, const Members& members,
                                                     device::Device& device,
                                                     const std::shared_ptr<Patience>& patience) {
  // NCCL takes the calling thread's current device; a stream knows which one that has to be.
  const auto stream = device.make_stream("nccl");
  static_cast<void>(device::as_cuda(*stream).native());
  refuse_shared_gpus(ranks);
  device::check_cuda(static_cast<cudaError_t>(load_sum()), "loading the kernels of sums");
  return std::make_unique<NcclCommunicator>(ranks, members, patience);
}

}  // namespace ballast::comm
