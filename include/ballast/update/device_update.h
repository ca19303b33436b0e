#pragma once

#include <memory>

#include "ballast/cpu_adam/optimizer.h"
#include "ballast/cpu_adam/updater.h"
#include "ballast/device/device.h"

namespace ballast::update {

/// Runs optimizer updates on states in device memory. Results equal those of cpu_adam::Updater bit
/// for bit on every device, except for payload and sign of a NaN.
class DeviceUpdate {
 public:
  virtual ~DeviceUpdate() = default;
  DeviceUpdate() = default;
  DeviceUpdate(const DeviceUpdate&) = delete;
  DeviceUpdate& operator=(const DeviceUpdate&) = delete;

  /// Enqueues one update on `stream`, a stream of the device. All arrays of `shard` are in device
  /// memory and stay valid until it is done. Throws, or `stream` raises, Error(device) and the
  /// Error(state) of Updater::step.
  virtual void step(device::Stream& stream, const cpu_adam::Hyper& hyper,
                    const cpu_adam::Shard& shard) = 0;
};

/// Makes the updates for `device`. `updater` performs the updates of a host device and must outlive
/// the object. Throws Error(device).
std::unique_ptr<DeviceUpdate> make_device_update(device::Device& device,
                                                 const cpu_adam::Updater& updater);

/// Makes updates by kernels on a CUDA device. Throws Error(device).
std::unique_ptr<DeviceUpdate> make_cuda_update(device::Device& device);

}  // namespace ballast::update
