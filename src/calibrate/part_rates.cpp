#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "ballast/core/error.h"

#include "src/calibrate/calibration.h"
#include "src/calibrate/timed_passes.h"

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

namespace {

using model::CostCurve;

/// A part is measured if it has at least these shares of the FLOPs and of the time of its layers,
/// above the noise.
constexpr double kLeastPartOfFlops = 0.1;
constexpr double kLeastPartOfTime = 0.03;

/// The time and the work by which a pass exceeds another one.
struct Excess {
  double pass = 0.0;  ///< seconds of the pass
  double seconds = 0.0;
  double flops = 0.0;  ///< FLOPs of attention, forward
};

/// `backward`: includes a forward pass.
plan::AttentionRate rate_from(AttentionClass of, const Excess& forward, const Excess& backward) {
  if (!(forward.seconds > kLeastPartOfTime * forward.pass)) return {};
  plan::AttentionRate rate = {.forward = forward.flops / forward.seconds};
  const double rest = backward.seconds - backward.flops / rate.forward;
  if (!(rest > kLeastPartOfTime * backward.pass)) return {};
  rate.backward = info_of(of).backward_flops() * backward.flops / rest;
  return rate;
}

/// Times of whole layers, in which parts are found by differences.
class PartTimes {
 public:
  PartTimes(const Sample& sample, std::uint64_t sequences)
      : sample_(sample), sequences_(sequences), whole_(sample, {sequences, sample.length}) {}

  [[nodiscard]] bool is_large(AttentionClass of) const {
    const TimedPasses::Work forward = whole_.work(CostCurve::forward, of);
    return forward.passes > 0.0 && forward.attention_flops >= kLeastPartOfFlops * forward.flops &&
           whole_.work(CostCurve::backward, of).passes > 0.0;
  }
  /// Measures attention by the time that whole sequences take longer than their pieces.
  plan::AttentionRate attention(AttentionClass of) {
    constexpr std::uint64_t kPieces = 8;
    const std::uint64_t pieces = std::min(kPieces, sample_.length);
    if (!cut_) {
      cut_.emplace(sample_, model::MicroBatchShape{sequences_ * pieces, sample_.length / pieces});
    }
    const double tokens = whole_.tokens() / cut_->tokens();
    const auto excess = [&](CostCurve curve) -> Excess {
      const double pass = whole_.seconds(curve, of);
      return {
          pass, pass - tokens * cut_->seconds(curve, of),
          whole_.work(curve, of).attention_flops - tokens * cut_->work(curve, of).attention_flops};
    };
    return rate_from(of, excess(CostCurve::forward), excess(CostCurve::backward));
  }
  /// Measures recurrences, whose work grows with the tokens alone, by the time that their layers
  /// take longer than their products would at the speed of layers with attention.
  plan::AttentionRate recurrence(const PartRates& measured) {
    const AttentionClass of = AttentionClass::recurrence;
    const auto excess = [&](CostCurve curve) -> Excess {
      const TimedPasses::Work work = whole_.work(curve, of);
      const double pass = whole_.seconds(curve, of);
      const double rate = rate_of_products(curve, measured);
      return {pass, rate > 0.0 ? pass - products_of(work, curve) / rate : 0.0,
              work.attention_flops};
    };
    return rate_from(of, excess(CostCurve::forward), excess(CostCurve::backward));
  }
  /// Returns the bytes per second of adapters, by the time that layers take longer than without
  /// them: layers of `plain`. 0: not measured.
  double adapters(TimedPasses& plain) {
    const CostCurve curve = CostCurve::forward;
    const TimedPasses::Work with = whole_.work(curve);
    const TimedPasses::Work without = plain.work(curve);
    const double pass = whole_.seconds(curve);
    const double more = pass - plain.seconds(curve) * with.flops / without.flops;
    return more > kLeastPartOfTime * pass ? with.adapter_traffic / more : 0.0;
  }

 private:
  /// FLOPs outside of attention.
  static double products_of(const TimedPasses::Work& work, CostCurve curve) {
    return work.flops - counted_flops(work.attention_flops, curve);
  }
  /// FLOP/s of layers with attention, outside of attention; 0: there are none. Attention without
  /// rates counts as products.
  double rate_of_products(CostCurve curve, const PartRates& measured) {
    double flops = 0.0;
    double seconds = 0.0;
    for (const AttentionClassInfo& info : kAttentionClasses) {
      const TimedPasses::Work work = whole_.work(curve, info.id);
      if (info.id == AttentionClass::recurrence || work.passes == 0.0) continue;
      const plan::AttentionRate& rate = measured.attention[index_of(info.id)];
      double own_flops = work.flops;
      double own_seconds = whole_.seconds(curve, info.id);
      if (rate.forward > 0.0) {
        own_flops = products_of(work, curve);
        own_seconds -= seconds_of_attention(info.id, rate, work.attention_flops, curve);
      }
      flops += work.passes * own_flops;
      seconds += work.passes * own_seconds;
    }
    return seconds > 0.0 ? flops / seconds : 0.0;
  }

  const Sample& sample_;
  std::uint64_t sequences_;
  TimedPasses whole_;
  std::optional<TimedPasses> cut_;
};

/// Returns whether the layers have the products of LoRA, without those of DoRA.
bool has_adapters(const Sample& sample) {
  return sample.computed.adapters && !sample.computed.adapters->dora;
}

/// Returns the layers of `sample` without adapters. Only the last norm is trained, so that layers
/// need no memory for gradients.
Sample without_adapters(const Sample& sample) {
  Sample plain = sample;
  plain.computed = sample.blueprint.model;
  const std::string norm = plain.computed.outer.norm.name + ".*";
  model::freeze(plain.computed, {&norm, 1}, [&](std::size_t /*pattern*/, const std::string& rule) {
    throw Error(ErrorCategory::state, rule);
  });
  return plain;
}

}  // namespace

PartRates measure_parts(const Sample& sample, std::uint64_t sequences) {
  PartTimes times(sample, sequences);
  PartRates rates;
  const auto rate_of = [&](AttentionClass of) -> plan::AttentionRate& {
    return rates.attention[index_of(of)];
  };
  for (const AttentionClassInfo& info : kAttentionClasses) {
    if (info.id == AttentionClass::recurrence || !times.is_large(info.id)) continue;
    sample.check_interrupt();
    rate_of(info.id) = times.attention(info.id);
  }
  if (times.is_large(AttentionClass::recurrence)) {
    rate_of(AttentionClass::recurrence) = times.recurrence(rates);
  }
  if (has_adapters(sample)) {
    const Sample plain = without_adapters(sample);
    TimedPasses without(plain, {sequences, sample.length});
    rates.adapters = times.adapters(without);
  }
  return rates;
}

}  // namespace ballast::calibrate
