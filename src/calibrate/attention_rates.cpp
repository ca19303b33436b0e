#include <utility>

#include "src/calibrate/calibration.h"

namespace ballast::calibrate {
namespace {

/// The rest of a layer takes at least this share of its time.
constexpr double kLeastRest = 0.2;

/// The part of a pass that has its own rates.
struct SeparatePart {
  double flops = 0.0;
  double seconds = 0.0;
};

/// Takes `part` out of a point that was measured on `flops`. Returns whether enough is left.
bool reduce(plan::CurvePoint& point, double flops, const SeparatePart& part) {
  const double all = flops / point.flops_per_second;
  const double rest = all - part.seconds;
  if (rest < kLeastRest * all || !(flops > part.flops)) return false;
  point.flops_per_second = (flops - part.flops) / rest;
  return true;
}

double seconds_of_adapters(double traffic, const plan::Rates& rates) {
  return rates.adapter_per_second > 0.0 ? traffic / rates.adapter_per_second : 0.0;
}

SeparatePart forward_part(const LayerWork& layer, const plan::Rates& rates) {
  SeparatePart part = {.seconds = seconds_of_adapters(layer.adapters, rates)};
  for (const AttentionClassInfo& info : kAttentionClasses) {
    const double flops = layer.attention[static_cast<std::size_t>(info.id)];
    const plan::AttentionRate& rate = rates.of(info.id);
    if (flops == 0.0 || rate.forward == 0.0) continue;
    part.flops += flops;
    part.seconds += flops / rate.forward;
  }
  return part;
}

/// The backward pass counts twice the FLOPs of the forward pass, and recomputes it.
SeparatePart backward_part(const LayerWork& layer, const plan::Rates& rates) {
  SeparatePart part = {.seconds = seconds_of_adapters(layer.adapters_of_backward, rates)};
  for (const AttentionClassInfo& info : kAttentionClasses) {
    const double again = layer.attention_of_backward[static_cast<std::size_t>(info.id)];
    const plan::AttentionRate& rate = rates.of(info.id);
    if (again == 0.0 || rate.forward == 0.0) continue;
    part.flops += 3.0 * again;
    part.seconds += again / rate.forward + 2.0 * info.backward_products * again / rate.backward;
  }
  return part;
}

}  // namespace

void separate_parts(plan::Rates& rates, const PartRates& parts,
                    const std::function<LayerWork(double tokens)>& work_of) {
  plan::Rates separate = rates;
  for (const AttentionClassInfo& info : kAttentionClasses) {
    const plan::AttentionRate& rate = parts.attention[static_cast<std::size_t>(info.id)];
    if (rate.forward > 0.0 && rate.backward > 0.0) separate.of(info.id) = rate;
  }
  separate.adapter_per_second = parts.adapters;
  bool enough = true;
  for (plan::CurvePoint& point : separate.forward) {
    const LayerWork layer = work_of(point.tokens);
    enough = enough && reduce(point, layer.forward, forward_part(layer, separate));
  }
  for (plan::CurvePoint& point : separate.backward) {
    const LayerWork layer = work_of(point.tokens);
    enough = enough && reduce(point, layer.backward, backward_part(layer, separate));
  }
  if (enough) rates = std::move(separate);
}

}  // namespace ballast::calibrate
