#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>

#include "ballast/device/streams.h"
#include "ballast/model/compute.h"
#include "ballast/model/packed_values.h"

#include "src/model/compute/formulas.h"
#include "src/model/compute/layer.h"
#include "src/model/compute/routing.h"
#include "src/model/cuda/attention/attention.h"
#include "src/model/cuda/products/products.h"
#include "src/model/cuda/rows/rows.h"
#include "src/model/cuda/shared_state.h"
#include "src/model/cuda/tokens/tokens.h"
#include "src/model/cuda/work_check.h"

namespace ballast::model::cuda {

/// The operations of the CUDA device (../layer.h), documented at the host device's (../host/ops.h).
/// Each enqueues kernels on the stream of run(). CUDA is not used before the first operation, so
/// that plans can be made without a GPU.
template <class T>
class Ops : public DeviceOps<T> {
 public:
  static constexpr Bytes kLogitBytes = 512 * kMiB;
  /// See in_whole_eights().
  static constexpr bool sums_in_parts(std::size_t extent) {
    return sizeof(T) == 2 && whole_eights(extent) < extent;
  }

  Ops(const KernelExtents& extents, const KernelOptions& options);

  [[nodiscard]] static constexpr MlpRule mlp_rule() {
    return {.bytes = 1 * kGiB, .joins_gate_and_up = true};
  }

  /// Calls `work`, whose operations are enqueued on `stream`.
  template <class Work>
  void run(device::Stream& stream, const Work& work) {
    state_->use(stream);
    work();
  }

  void take_memory(Bump& bump);

  /// See Compute::arithmetic(). Describes the calling thread's current GPU.
  [[nodiscard]] std::string arithmetic() const;

  // Collectives call these functions, too, on threads and streams that differ from those of run().

 private:
  State state_;
};

}  // namespace ballast::model::cuda
