#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "ballast/core/clocks.h"
#include "ballast/device/device.h"
#include "ballast/model/packed_values.h"

#include "src/model/compute/factories.h"
#include "src/model/compute/formulas.h"
#include "src/model/compute/kernel_arguments.h"
#include "src/model/compute/layer.h"
#include "src/model/compute/routing.h"
#include "src/model/host/kernel_tables.h"
#include "src/model/host/products.h"
#include "src/model/host/shared_state.h"
#include "src/model/ops/device_ops.h"

namespace ballast::model::host {

/// The operations of the host device (../layer.h), spread over the OpenMP team of the stream's
/// thread. Per-thread sums of weight gradients are added in thread order.
template <class T>
class Ops : public DeviceOps<T> {
 public:
  /// Maximum memory for logits.
  static constexpr Bytes kLogitBytes = 128 * kMiB;
  /// Returns whether a product that sums over `extent` elements does so in parts. Each part then
  /// adds to the result, which must be fp32.
  static constexpr bool sums_in_parts(std::size_t /*extent*/) { return false; }

  /// `threads`: size of the team.
  Ops(const KernelExtents& extents, std::size_t threads, const MlpRule& mlp_rule = kMlpRule);

  [[nodiscard]] const MlpRule& mlp_rule() const { return mlp_rule_; }

  /// Enqueues `work`, which calls the functions below.
  void run(device::Stream& stream, std::function<void()> work);

  /// See Compute::arithmetic().
  [[nodiscard]] std::string arithmetic() const { return describe_arithmetic(threads_); }
  /// Takes the memory shared by all operations.
  void take_memory(Bump& bump) { state_->take_memory(bump); }

 private:
  State<T> state_;
  std::size_t threads_;
  MlpRule mlp_rule_;
};

}  // namespace ballast::model::host
