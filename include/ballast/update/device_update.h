#pragma once

#include <memory>

#include "ballast/cpu_adam/optimizer.h"
#include "ballast/cpu_adam/shard.h"
#include "ballast/cpu_adam/updater.h"
#include "ballast/device/device.h"

namespace ballast::update {

/// Runs optimizer updates on the states in a device's memory. The result does not depend on the
/// device: bit for bit that of cpu_adam::Updater, whose rules all devices compile; only the payload
/// and the sign of a NaN may differ.
class DeviceUpdate {
 public:
  virtual ~DeviceUpdate() = default;
  DeviceUpdate() = default;
  DeviceUpdate(const DeviceUpdate&) = delete;
  DeviceUpdate& operator=(const DeviceUpdate&) = delete;

  /// Enqueues one update on `stream`, a stream of the device; all arrays of `shard` are memory of
  /// the device and stay valid until it is done. Throws, or `stream` raises, Error(state) as
  /// Updater::step does, and Error(device).
  virtual void step(device::Stream& stream, const cpu_adam::Hyper& hyper,
                    const cpu_adam::Shard& shard) = 0;
};

/// The updates of `device`. `updater` works on the host device, whose memory is the processor's
/// own, and must outlive the object. Throws Error(device).
std::unique_ptr<DeviceUpdate> make_device_update(device::Device& device,
                                                 const cpu_adam::Updater& updater);

}  // namespace ballast::update
