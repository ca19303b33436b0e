#include "src/model/compute/device_compute.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "ballast/model/architecture.h"
#include "ballast/model/compute.h"
#include "ballast/model/family.h"

#include "src/model/compute/delta_net.h"
#include "src/model/compute/factories.h"
#include "src/model/compute/layer_memory.h"
#include "src/model/description/families/families.h"
#include "src/model/ops/device_ops.h"

namespace ballast::model {

KernelExtents kernel_extents(const Architecture& model, MicroBatchShape shape) {
  const ModelConfig config = config_of_tile(model.config);
  KernelExtents extents = {.shape = shape,
                           .hidden = config.hidden_size,
                           .vocabulary = config.vocab_size,
                           .heads = attention_shapes(config, shape),
                           .epsilon = static_cast<float>(config.norm_epsilon)};
  extents.delta = delta_shape(config, extents.heads.front());
  extents.widest_sum = std::max({widest_row(extents.heads), extents.hidden,
                                 static_cast<std::size_t>(config.intermediate_size),
                                 static_cast<std::size_t>(widest_of_specs(config))});
  extents.has_layer_inputs = family(config.family).layer_input_width(config) > 0;
  return extents;
}

template <class T>
std::unique_ptr<Compute> make_device_compute(const Architecture& model, MicroBatchShape shape,
                                             DeviceOps<T> ops) {
  return std::make_unique<DeviceCompute<T>>(model, shape, std::move(ops));
}

template std::unique_ptr<Compute> make_device_compute(const Architecture&, MicroBatchShape,
                                                      DeviceOps<float>);
template std::unique_ptr<Compute> make_device_compute(const Architecture&, MicroBatchShape,
                                                      DeviceOps<Bf16>);
template std::unique_ptr<Compute> make_device_compute(const Architecture&, MicroBatchShape,
                                                      DeviceOps<F16>);

}  // namespace ballast::model
