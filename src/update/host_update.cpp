#include "ballast/core/clocks.h"
#include "ballast/core/error.h"
#include "ballast/device/streams.h"
#include "ballast/update/device_update.h"

namespace ballast::update {
namespace {

/// Uses the threads of the updater, not the stream's, so that host and device updates share them.
class HostUpdate final : public DeviceUpdate {
 public:
  explicit HostUpdate(const cpu_adam::Updater& updater) : updater_(updater) {}

  void step(device::Stream& stream, const cpu_adam::Hyper& hyper,
            const cpu_adam::Shard& shard) override {
    device::as_host(stream).enqueue([&updater = updater_, hyper, shard] {
      const KernelClock clock(KernelGroup::update);
      updater.step(hyper, shard);
    });
  }

 private:
  const cpu_adam::Updater& updater_;
};

}  // namespace

std::unique_ptr<DeviceUpdate> make_device_update(device::Device& device,
                                                 const cpu_adam::Updater& updater) {
  if (device.kind() == "host") return std::make_unique<HostUpdate>(updater);
  expects(device.kind() == "cuda", "update: unknown kind of device");
  return make_cuda_update(device);
}

}  // namespace ballast::update
