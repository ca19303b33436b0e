#include "src/offload/state_values.h"

#include <algorithm>
#include <vector>

#include "ballast/core/error.h"
#include "ballast/cpu_adam/reference.h"

namespace ballast::offload {
namespace {

using cpu_adam::Shard;
using cpu_adam::Weights;

StateValues part_of(const StateValues& values, const ParameterPart& part) {
  const auto some = [&part](std::span<float> all) {
    return all.empty() ? all : all.subspan(part.first, part.count);
  };
  return {some(values.master), some(values.first), some(values.second)};
}

void read_master(const Weights& weights, std::span<float> out) {
  if (weights.format == Weights::Format::split) {
    const auto* weight = static_cast<const Bf16*>(weights.main);
    const auto* remainder = static_cast<const std::uint16_t*>(weights.remainder_or_copy);
    for (std::size_t i = 0; i < out.size(); ++i) out[i] = join_master({weight[i], remainder[i]});
  } else {
    std::copy_n(static_cast<const float*>(weights.main), out.size(), out.begin());
  }
}

void write_master(const Weights& weights, std::span<const float> values) {
  if (weights.format == Weights::Format::split) {
    auto* weight = static_cast<Bf16*>(weights.main);
    auto* remainder = static_cast<std::uint16_t*>(weights.remainder_or_copy);
    for (std::size_t i = 0; i < values.size(); ++i) {
      const SplitMaster split = split_master(values[i]);
      weight[i] = split.weight;
      remainder[i] = split.remainder;
    }
  } else {
    std::ranges::copy(values, static_cast<float*>(weights.main));
    auto* copy = static_cast<F16*>(weights.remainder_or_copy);
    for (std::size_t i = 0; i < values.size(); ++i) copy[i] = to_f16(values[i]);
  }
}

}  // namespace

void read_values(cpu_adam::Optimizer optimizer, const Shard& shard, const StateValues& values) {
  cpu_adam::read_moments(optimizer, shard, values.first, values.second);
  if (shard.weights.format != Weights::Format::plain && !values.master.empty()) {
    read_master(shard.weights, values.master);
  }
}

void write_values(cpu_adam::Optimizer optimizer, const Shard& shard, const StateValues& values) {
  cpu_adam::write_moments(optimizer, shard, values.first, values.second);
  if (shard.weights.format != Weights::Format::plain && !values.master.empty()) {
    write_master(shard.weights, values.master);
  }
}

void read_values(OffloadedOptimizer& states, std::size_t parameter, void* weights,
                 const StateValues& values) {
  states.visit(parameter, weights, [&](const ParameterPart& part, const Shard& shard) {
    read_values(states.layout().optimizer(), shard, part_of(values, part));
    return false;
  });
}

void write_values(OffloadedOptimizer& states, std::size_t parameter, void* weights,
                  const StateValues& values) {
  states.visit(parameter, weights, [&](const ParameterPart& part, const Shard& shard) {
    write_values(states.layout().optimizer(), shard, part_of(values, part));
    return true;
  });
}

namespace {

/// Writes the values of `source` that overlap `part`. Returns whether there are any.
bool write_overlap(cpu_adam::Optimizer optimizer, const ParameterPart& source,
                   const StateValues& values, const ParameterPart& part, const Shard& shard) {
  const Elems first = std::max(source.first, part.first);
  const Elems last = std::min(source.first + source.count, part.first + part.count);
  if (first >= last) return false;
  const auto from_source = [&](std::span<float> all) {
    return all.empty() ? all : all.subspan(first - source.first, last - first);
  };
  write_values(optimizer, cpu_adam::part_of(shard, first - part.first, last - first),
               {from_source(values.master), from_source(values.first), from_source(values.second)});
  return true;
}

}  // namespace

void copy_states(OffloadedOptimizer& from, std::size_t parameter, OffloadedOptimizer& to,
                 std::size_t target, void* weights) {
  const cpu_adam::Optimizer optimizer = from.layout().optimizer();
  const Parameter& source = from.layout().parameters().at(parameter);
  const Parameter& other = to.layout().parameters().at(target);
  expects(&from != &to && optimizer == to.layout().optimizer() &&
              source.elements == other.elements &&
              (weights == nullptr || source.type == other.type),
          "optimizer states: copies between other parameters");
  const bool has_master = weights != nullptr && source.type != DType::f32;
  std::vector<float> master, first, second;
  from.visit(parameter, weights, [&](const ParameterPart& part, const Shard& shard) {
    master.resize(has_master ? part.count : 0);
    first.resize(cpu_adam::has_first_moment(optimizer) ? part.count : 0);
    second.resize(cpu_adam::has_second_moment(optimizer) ? part.count : 0);
    read_values(optimizer, shard, {master, first, second});
    to.visit(target, weights, [&](const ParameterPart& target_part, const Shard& target_shard) {
      return write_overlap(optimizer, part, {master, first, second}, target_part, target_shard);
    });
    return false;
  });
}

}  // namespace ballast::offload
