#pragma once

#include <cstddef>

#include "ballast/core/error.h"
#include "ballast/model/attention.h"
#include "ballast/model/family.h"

#include "src/model/compute/layer.h"
#include "src/model/compute/layer_memory.h"

namespace ballast::model {

/// The part of a layer in sharing keys and values (Family::keys_of()).
struct SharedKeysAt {
  bool reads = false;  ///< reads keys and values of another layer
  bool gives = false;  ///< others read its keys and values
  bool last = false;   ///< no later layer reads the same keys and values
};

inline SharedKeysAt find_shared_keys(const ModelConfig& config, std::uint64_t layer) {
  const std::uint64_t source = family(config.family).keys_of(config, layer);
  const std::uint64_t last = last_reader_of_keys(config, source);
  return {source != layer, source == layer && last != layer, last == layer};
}

/// Moves keys and values between the rows of LayerMemory::qkv and the value that layers share,
/// which has them after norms and rotation. Gradients of all readers are summed in fp32 from the
/// last layer to the first, and rounded once when their layer adds its own.
template <class Ops>
class SharedKeys {
 public:
  using T = typename Ops::Value;

  explicit SharedKeys(Ops& ops) : ops_(ops) {}

  void forward(const AttentionShape& shape, const SharedKeysAt& at, const LayerLinks<T>& links,
               const LayerMemory<T>& m) {
    const std::size_t width = 2 * shape.kv_width();
    const Groups columns = {shape.tokens(), 1, width};
    T* const own = m.qkv + shape.width();
    if (at.reads) {
      ops_.copy_groups(columns, links.keys_values, {width, 0}, own, {shape.row(), 0});
    } else if (at.gives && !links.backward) {
      ops_.copy_groups(columns, own, {shape.row(), 0}, links.keys_values, {width, 0});
    }
  }
  /// Adds gradients in LayerMemory::dqkv to the sums, or the sums to them.
  void backward(const AttentionShape& shape, const SharedKeysAt& at, const LayerLinks<T>& links,
                const LayerMemory<T>& m) {
    if (links.keys_values_gradient == nullptr) return;
    const std::size_t width = 2 * shape.kv_width();
    T* const own = m.dqkv + shape.width();
    if (at.reads) {
      ops_.links().sum_columns(own, shape.row(), shape.tokens(), width, !at.last,
                               links.keys_values_gradient);
    } else if (at.gives) {
      ops_.links().add_sums(links.keys_values_gradient, shape.tokens(), width, own, shape.row());
    }
  }

 private:
  Ops& ops_;
};

}  // namespace ballast::model
