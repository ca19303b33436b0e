#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "ballast/core/error.h"

#include "src/comm/checks.h"
#include "src/comm/factories.h"
#include "src/comm/host_work.h"

namespace ballast::comm {
namespace {

void copy_bytes(std::byte* to, const std::byte* from, Bytes bytes) {
  if (bytes != 0 && to != from) std::memcpy(to, from, bytes);
}

/// One rank: gathers and sums are copies.
class SelfCommunicator final : public Communicator {
 public:
  void all_gather(device::Stream& stream, ConstDeviceBytes part, DeviceBytes whole) override {
    check_all_gather(part, whole, 1);
    as_host(stream).enqueue([=] { copy_bytes(whole.raw(), part.raw(), part.size()); });
  }
  void reduce_scatter(device::Stream& stream, DeviceBytes whole, DeviceBytes part, DType type,
                      DeviceBytes scratch) override {
    check_reduce_scatter(whole, part, type, scratch, 1);
    as_host(stream).enqueue([=] { copy_bytes(part.raw(), whole.raw(), part.size()); });
  }
  void all_reduce(device::Stream& stream, DeviceBytes whole, DType type,
                  DeviceBytes scratch) override {
    check_all_reduce(whole, type, scratch, 1);
    as_host(stream);
  }
  void broadcast(device::Stream& stream, DeviceBytes data, std::uint32_t root) override {
    check_broadcast(data, root, 1);
    as_host(stream);
  }
};

class SelfRanks final : public Ranks {
 public:
  SelfRanks(const Launch& launch, const JoinOptions& options)
      : launch_(launch), patience_(std::make_shared<Patience>(options)) {}

  const Launch& launch() const override { return launch_; }
  std::string_view kind() const override { return "self"; }

  std::unique_ptr<Communicator> make_channel(device::Device& device,
                                             std::span<const std::uint32_t> ranks) override {
    const Members members(ranks, rank(), world());
    if (device.kind() == "cuda") return make_nccl_communicator(*this, members, device, patience_);
    check_host_device(device);
    return std::make_unique<SelfCommunicator>();
  }
  void all_gather(ConstHostBytes part, HostBytes whole) override {
    expects(whole.size() == part.size(), "all_gather: the whole is not one part per rank");
    copy_bytes(whole.data(), part.data(), part.size());
  }
  std::string broadcast(std::string text) override { return text; }
  void barrier() override {}
  void abort(int status) override {
    std::fflush(nullptr);
    std::_Exit(status);
  }

 private:
  Launch launch_;
  std::shared_ptr<Patience> patience_;
};

}  // namespace

std::unique_ptr<Ranks> make_self_ranks(const Launch& launch, const JoinOptions& options) {
  return std::make_unique<SelfRanks>(launch, options);
}

}  // namespace ballast::comm
