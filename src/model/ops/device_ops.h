#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "ballast/model/attention.h"
#include "ballast/model/kernels.h"

#include "src/model/compute/kernel_arguments.h"
#include "src/model/ops/attention_ops.h"
#include "src/model/ops/expert_ops.h"
#include "src/model/ops/product_ops.h"
#include "src/model/ops/row_ops.h"
#include "src/model/ops/token_ops.h"

namespace ballast::model {

struct Architecture;

/// Extents of a model that the operations of a device depend on, for micro-batches of one shape.
struct KernelExtents {
  MicroBatchShape shape;
  std::size_t hidden = 0;  ///< hidden_size
  std::size_t vocabulary = 0;
  /// Shapes of attention in the layers, each once, in the order of the layers. A model without
  /// layers has one shape, too.
  std::vector<AttentionShape> heads;
  DeltaShape delta;            ///< without heads if no layer has a delta net
  std::size_t widest_sum = 0;  ///< columns of the widest sum over rows, apart from delta nets
  float epsilon = 0.0F;        ///< that of norms without their own
  bool has_layer_inputs = false;
};

KernelExtents kernel_extents(const Architecture& model, MicroBatchShape shape);

/// The operations of a device for values of T. Their arguments are views of its memory. An
/// operation covers what at least one device fuses. Only the operations use streams and thread
/// teams.
template <class T>
struct DeviceOps {
  using Value = T;

  std::shared_ptr<NormOps<T>> norms;
  std::shared_ptr<ElementwiseOps<T>> elementwise;
  std::shared_ptr<PackingOps<T>> packing;
  std::shared_ptr<ProductOps<T>> products;
  std::shared_ptr<AdapterOps<T>> adapters;
  std::shared_ptr<RouterOps<T>> routers;
  std::shared_ptr<ExpertOps<T>> experts;
  std::shared_ptr<TokenOps<T>> tokens;
  std::shared_ptr<LossOps<T>> losses;
  std::shared_ptr<HeadOps<T>> heads;
  std::shared_ptr<AttentionOps<T>> attention;
  std::shared_ptr<MixerOps<T>> mixers;
  std::shared_ptr<LinkOps<T>> links;
};

}  // namespace ballast::model
