#pragma once

#include <cstddef>

#include "ballast/core/memory.h"
#include "ballast/model/architecture.h"
#include "ballast/model/compute.h"

#include "src/model/compute/output_head.h"
#include "src/model/compute/pass_views.h"
#include "src/model/description/layer_spec.h"

namespace ballast::model {

/// The rows on both sides of experts. Experts read the result of a norm before them, or of the norm
/// before attention. Their fp32 sum begins with the residual stream, or has a norm that the stream
/// is added to. Functions return the work of a pass, which keeps its arguments.
template <class T>
class NormsAroundExperts {
 public:
  NormsAroundExperts(const Architecture& model, std::size_t tokens, DeviceOps<T>& ops,
                     TileSums<T>& sums)
      : model_(model), tokens_(tokens), ops_(ops), sums_(sums) {}

  /// Whether the router in `block` reads the norm before attention.
  [[nodiscard]] bool shares_norm(std::size_t block) const {
    return model_.layer(model_.blocks[block].layer).sublayers.back().reads == Reads::same_norm;
  }
  /// Begins the sums of a half with its input `in` [N, H]. If the sum has a norm, begins them with
  /// zeros and copies the input to `residual`.
  void begin(const T* in, DeviceBytes residual, float* sums) const {
    if (residual.empty()) return ops_.elementwise->widen(in, sums, size());
    ops_.elementwise->zero(sums, size());
    copy(reinterpret_cast<const std::byte*>(in), residual.raw());
  }
  /// Router: takes over the result of the norm before attention.
  [[nodiscard]] auto take_norm(const PassArguments& args) const {
    return
        [this, in = args[Port::input], normed = args[Port::normed],
         residual = as<T>(args[Port::residual]), sums = view_as<float>(args[Port::partial_sums])] {
          copy(in.raw(), normed.raw());
          if (!sums.empty()) begin(residual, {}, sums.raw());
        };
  }
  /// Router, backward: rounds the experts' gradient of that result.
  [[nodiscard]] auto give_gradient(const PassArguments& args) const {
    return [this, sums = as<float>(args[Port::partial_sums]),
            to = as<T>(args[Port::normed_gradient])] { sums_.round(sums, to); };
  }
  /// Adds the norm of the rounded sum to the residual stream.
  [[nodiscard]] auto result(const Norm<T>& norm, const PassArguments& args) const {
    return
        [this, norm, in = as<T>(args[Port::input]), residual = as<T>(args[Port::residual]),
         out = as<T>(args[Port::output])] { ops_.norms->norm(norm, in, out, tokens_, residual); };
  }
  /// Writes the gradient of the sum. That of the residual stream is that of the output.
  [[nodiscard]] auto result_backward(const Norm<T>& norm, const PassArguments& args) const {
    return [this, norm, in = as<T>(args[Port::input]), dy = as<T>(args[Port::activation_gradient]),
            dx = as<T>(args[Port::result_gradient])] {
      ops_.norms->norm_backward(norm, in, dy, nullptr, dx, tokens_);
    };
  }

 private:
  [[nodiscard]] std::size_t size() const { return tokens_ * model_.config.hidden_size; }
  void copy(const std::byte* from, std::byte* to) const {
    ops_.elementwise->copy_bytes(from, to, size() * sizeof(T));
  }

  const Architecture& model_;
  std::size_t tokens_;
  DeviceOps<T>& ops_;
  TileSums<T>& sums_;
};

}  // namespace ballast::model
