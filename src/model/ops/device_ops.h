#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ballast/core/memory.h"
#include "ballast/core/units.h"
#include "ballast/model/attention.h"
#include "ballast/model/kernels.h"

#include "src/model/compute/kernel_arguments.h"
#include "src/model/ops/attention_ops.h"
#include "src/model/ops/expert_ops.h"
#include "src/model/ops/product_ops.h"
#include "src/model/ops/row_ops.h"
#include "src/model/ops/token_ops.h"

namespace ballast::device {
class Stream;
}  // namespace ballast::device

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

/// Computes the extents, for a model in tiles those of one tile.
KernelExtents kernel_extents(const Architecture& model, MicroBatchShape shape);

/// How a device computes the MLPs of layers and experts.
struct MlpRule {
  /// Upper limit for the arrays [N, intermediate_size] of an MLP that exist at a time.
  Bytes bytes = 0;
  /// Whether one product computes gate and up.
  bool joins_gate_and_up = false;
};

/// Decisions of a device about the passes of a model.
struct DeviceTraits {
  MlpRule mlp;
  Bytes logit_bytes = 0;  ///< upper limit for logits
  /// Returns whether a product that sums over `extent` elements does so in parts. Each part then
  /// adds to the result, which must be fp32.
  bool (*sums_in_parts)(std::size_t extent) = nullptr;
};

/// Runs passes.
class WorkQueue {
 public:
  virtual ~WorkQueue() = default;

  /// Runs `work` on `stream`, or enqueues it there. The operations that it calls run on this
  /// stream.
  virtual void run(device::Stream& stream, std::function<void()> work) = 0;
  /// See Compute::arithmetic().
  [[nodiscard]] virtual std::string arithmetic() const = 0;
  /// Takes the memory that operations share.
  virtual void take_memory(Bump& bump) = 0;
};

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
  std::shared_ptr<WorkQueue> queue;
  DeviceTraits traits;
};

}  // namespace ballast::model
