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

/// The parts of a pass. `attention`: FLOPs of its forward pass; `adapters`: bytes.
SeparatePart part_of(const AttentionFlops& attention, double adapters, const plan::Rates& rates,
                     model::CostCurve curve) {
  SeparatePart part = {.seconds = seconds_of_adapters(adapters, rates)};
  for (const AttentionClassInfo& info : kAttentionClasses) {
    const double flops = attention[index_of(info.id)];
    const plan::AttentionRate& rate = rates.of(info.id);
    if (flops == 0.0 || rate.forward == 0.0) continue;
    part.flops += counted_flops(flops, curve);
    part.seconds += seconds_of_attention(info.id, rate, flops, curve);
  }
  return part;
}

}  // namespace

double counted_flops(double flops, model::CostCurve curve) {
  return (curve == model::CostCurve::backward ? 3.0 : 1.0) * flops;
}

double seconds_of_attention(AttentionClass of, const plan::AttentionRate& rate, double flops,
                            model::CostCurve curve) {
  const double forward = flops / rate.forward;
  if (curve != model::CostCurve::backward) return forward;
  return forward + info_of(of).backward_flops() * flops / rate.backward;
}

void separate_parts(plan::Rates& rates, const PartRates& parts,
                    const std::function<LayerWork(double tokens)>& work_of) {
  plan::Rates separate = rates;
  for (const AttentionClassInfo& info : kAttentionClasses) {
    const plan::AttentionRate& rate = parts.attention[index_of(info.id)];
    if (rate.forward > 0.0 && rate.backward > 0.0) separate.of(info.id) = rate;
  }
  separate.adapter_per_second = parts.adapters;
  bool enough = true;
  for (plan::CurvePoint& point : separate.forward) {
    const LayerWork layer = work_of(point.tokens);
    enough = enough &&
             reduce(point, layer.forward,
                    part_of(layer.attention, layer.adapters, separate, model::CostCurve::forward));
  }
  for (plan::CurvePoint& point : separate.backward) {
    const LayerWork layer = work_of(point.tokens);
    enough = enough && reduce(point, layer.backward,
                              part_of(layer.attention_of_backward, layer.adapters_of_backward,
                                      separate, model::CostCurve::backward));
  }
  if (enough) rates = std::move(separate);
}

}  // namespace ballast::calibrate
