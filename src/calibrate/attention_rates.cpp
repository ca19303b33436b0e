#include <utility>

#include "src/calibrate/calibration.h"

namespace ballast::calibrate {
namespace {

/// The rest of a layer takes at least this share of its time.
constexpr double kLeastRest = 0.2;

/// FLOPs and seconds of attention in one pass through a layer.
struct AttentionPart {
  double flops = 0.0;
  double seconds = 0.0;
};

/// Takes `part` out of a point that was measured on `flops`. Returns whether enough is left.
bool reduce(plan::CurvePoint& point, double flops, const AttentionPart& part) {
  const double all = flops / point.flops_per_second;
  const double rest = all - part.seconds;
  if (rest < kLeastRest * all || !(flops > part.flops)) return false;
  point.flops_per_second = (flops - part.flops) / rest;
  return true;
}

}  // namespace

void separate_attention(plan::Rates& rates, const AttentionRates& attention,
                        const std::function<LayerFlops(double tokens)>& flops_of) {
  if (!(attention.forward > 0.0 && attention.backward > 0.0)) return;
  plan::Rates separate = rates;
  separate.attention_forward_per_second = attention.forward;
  separate.attention_backward_per_second = attention.backward;
  bool enough = true;
  for (plan::CurvePoint& point : separate.forward) {
    const LayerFlops layer = flops_of(point.tokens);
    enough = enough &&
             reduce(point, layer.forward, {layer.attention, layer.attention / attention.forward});
  }
  for (plan::CurvePoint& point : separate.backward) {
    const LayerFlops layer = flops_of(point.tokens);
    // The backward pass counts twice the FLOPs of the forward pass, and recomputes it.
    const double again = layer.attention_of_backward;
    const double seconds =
        again / attention.forward + kAttentionBackward * again / attention.backward;
    enough = enough && reduce(point, layer.backward, {3.0 * again, seconds});
  }
  if (enough) rates = std::move(separate);
}

}  // namespace ballast::calibrate
