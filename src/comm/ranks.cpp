#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <fmt/format.h>

#include "ballast/core/error.h"

#include "src/comm/channel.h"

namespace ballast::comm {
namespace {

void copy_bytes(std::byte* to, const std::byte* from, Bytes bytes) {
  if (bytes != 0 && to != from) std::memcpy(to, from, bytes);
}

/// A channel of one rank: gathers and sums are copies.
class SelfCommunicator final : public Communicator {
 public:
  void all_gather(device::Stream& stream, ConstDeviceBytes shard, DeviceBytes whole) override {
    check_all_gather(shard, whole, 1);
    as_host(stream).enqueue([=] { copy_bytes(whole.raw(), shard.raw(), shard.size()); });
  }
  void reduce_scatter(device::Stream& stream, DeviceBytes whole, DeviceBytes shard, DType /*type*/,
                      DeviceBytes scratch) override {
    check_reduce_scatter(whole, shard, scratch, 1);
    as_host(stream).enqueue([=] { copy_bytes(shard.raw(), whole.raw(), shard.size()); });
  }
  void all_reduce(device::Stream& stream, DeviceBytes whole, DType /*type*/,
                  DeviceBytes scratch) override {
    check_all_reduce(whole, scratch, 1);
    as_host(stream);
  }
  void all_to_all(device::Stream& stream, ConstDeviceBytes input,
                  std::span<const Bytes> input_parts, DeviceBytes output,
                  std::span<const Bytes> output_parts) override {
    check_all_to_all(input, input_parts, output, output_parts, 1);
    const Bytes bytes = input_parts.front();
    as_host(stream).enqueue([=] { copy_bytes(output.raw(), input.raw(), bytes); });
  }
  void sum_terms(device::Stream& stream, const OrderedSum& sum, ConstDeviceBytes terms,
                 ConstDeviceBytes first, DeviceBytes out, DeviceBytes scratch) override {
    check_sum_terms(sum, terms, first, out, scratch, 1);
    as_host(stream).enqueue([=] { add_own_part(sum, 1, 0, terms, first, out, scratch); });
  }
  void broadcast(device::Stream& stream, DeviceBytes data, std::uint32_t root) override {
    check_broadcast(data, root, 1);
    as_host(stream);
  }
};

class SelfRanks final : public Ranks {
 public:
  SelfRanks(const Launch& launch, const JoinOptions& options)
      : launch_(launch), timeout_(std::make_shared<CollectiveTimeout>(options)) {}

  const Launch& launch() const override { return launch_; }
  std::string_view kind() const override { return "self"; }

  std::unique_ptr<Communicator> make_channel(device::Device& device,
                                             std::span<const std::uint32_t> ranks) override {
    const Members members(ranks, rank(), world());
    if (device.kind() == "cuda") return make_nccl_communicator(*this, members, device, timeout_);
    check_host_device(device);
    return std::make_unique<SelfCommunicator>();
  }
  void all_gather(ConstHostBytes shard, HostBytes whole) override {
    expects(whole.size() == shard.size(), "all_gather: `whole` must hold one shard per rank");
    copy_bytes(whole.data(), shard.data(), shard.size());
  }
  std::string broadcast(std::string text) override { return text; }
  void barrier() override {}
  void leave() override { timeout_->give_up(); }
  void abort(int status) override {
    std::fflush(nullptr);
    std::_Exit(status);
  }

 private:
  Launch launch_;
  std::shared_ptr<CollectiveTimeout> timeout_;
};

}  // namespace

std::unique_ptr<Ranks> join_ranks(const Launch& launch, const JoinOptions& options) {
  expects(launch.rank < launch.world, "join_ranks: the rank must be below the number of ranks");
  expects(options.timeout_seconds > 0.0, "join_ranks: the timeout must be above 0");
  if (launch.world == 1) return std::make_unique<SelfRanks>(launch, options);
  if (const std::string refusal = mpi_refusal(); !refusal.empty()) {
    throw Error(ErrorCategory::comm,
                fmt::format("{} started {} processes, but this program cannot join them: {}",
                            launch.launcher, launch.world, refusal));
  }
  return make_mpi_ranks(launch, options);
}

}  // namespace ballast::comm
