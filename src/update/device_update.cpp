#include "ballast/update/device_update.h"

#include "ballast/core/error.h"
#include "ballast/device/host_stream.h"

#include "src/update/factories.h"

namespace ballast::update {
namespace {

/// Works with the threads of the updater, not with those of the stream: there is one team of
/// threads for updates on the host and on the device.
class HostUpdate final : public DeviceUpdate {
 public:
  explicit HostUpdate(const cpu_adam::Updater& updater) : updater_(updater) {}

  void step(device::Stream& stream, const cpu_adam::Hyper& hyper,
            const cpu_adam::Shard& shard) override {
    device::as_host(stream).enqueue([this, hyper, shard] { updater_.step(hyper, shard); });
  }

 private:
  const cpu_adam::Updater& updater_;
};

}  // namespace

std::unique_ptr<DeviceUpdate> make_device_update(device::Device& device,
                                                 const cpu_adam::Updater& updater) {
  if (device.kind() == "host") return std::make_unique<HostUpdate>(updater);
  expects(device.kind() == "cuda", "there is no update for this device");
  return make_cuda_update(device);
}

}  // namespace ballast::update
