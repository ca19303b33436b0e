#include "src/offload/state_values.h"

#include <algorithm>
#include <vector>

#include "ballast/core/error.h"
#include "ballast/cpu_adam/reference.h"

namespace ballast::offload {
namespace {

StateValues part_of(const StateValues& values, const ParameterPart& part) {
  const auto some = [&part](std::span<float> all) {
    return all.empty() ? all : all.subspan(part.first, part.count);
  };
  return {some(values.master), some(values.first), some(values.second)};
}

}  // namespace

void read_values(cpu_adam::Optimizer optimizer, const PartStates& states,
                 const StateValues& values) {
  cpu_adam::read_moments(optimizer, states.shard, values.first, values.second);
  if (!values.master.empty()) read_master(states, values.master);
}

void write_values(cpu_adam::Optimizer optimizer, const PartStates& states,
                  const StateValues& values, NewMaster mode) {
  cpu_adam::write_moments(optimizer, states.shard, values.first, values.second);
  if (!values.master.empty()) write_master(states, values.master, mode);
}

void read_values(OffloadedOptimizer& states, std::size_t parameter, void* weights,
                 const StateValues& values) {
  states.visit(parameter, weights, [&](const ParameterPart& part, const PartStates& own) {
    read_values(states.layout().optimizer(), own, part_of(values, part));
    return false;
  });
}

void write_values(OffloadedOptimizer& states, std::size_t parameter, void* weights,
                  const StateValues& values, NewMaster mode) {
  states.visit(parameter, weights, [&](const ParameterPart& part, const PartStates& own) {
    write_values(states.layout().optimizer(), own, part_of(values, part), mode);
    return true;
  });
}

namespace {

/// A part of the states that are copied, and the fp32 values of its moments.
struct Source {
  const ParameterPart& part;
  const PartStates& states;
  std::span<float> first;
  std::span<float> second;
};

/// Copies the states of `source` that overlap `part`. Returns whether there are any.
bool copy_overlap(cpu_adam::Optimizer optimizer, const Source& source, const ParameterPart& part,
                  const PartStates& states) {
  const Elems first = std::max(source.part.first, part.first);
  const Elems last = std::min(source.part.first + source.part.count, part.first + part.count);
  if (first >= last) return false;
  const Elems at = first - source.part.first;
  const Elems count = last - first;
  const auto overlap = [&](std::span<float> all) {
    return all.empty() ? all : all.subspan(at, count);
  };
  const PartStates target = offload::part_of(states, first - part.first, count);
  write_values(optimizer, target, {{}, overlap(source.first), overlap(source.second)});
  if (source.states.shard.weights.format == target.shard.weights.format) {
    copy_master(offload::part_of(source.states, at, count), target);
  }
  return true;
}

}  // namespace

void copy_states(OffloadedOptimizer& from, std::size_t parameter, OffloadedOptimizer& to,
                 std::size_t target) {
  const cpu_adam::Optimizer optimizer = from.layout().optimizer();
  const Parameter& source = from.layout().parameters().at(parameter);
  const Parameter& other = to.layout().parameters().at(target);
  expects(&from != &to && optimizer == to.layout().optimizer() && source.elements == other.elements,
          "optimizer states: copies between other parameters");
  std::vector<float> first, second;
  from.visit(parameter, nullptr, [&](const ParameterPart& part, const PartStates& states) {
    first.resize(cpu_adam::has_first_moment(optimizer) ? part.count : 0);
    second.resize(cpu_adam::has_second_moment(optimizer) ? part.count : 0);
    read_values(optimizer, states, {{}, first, second});
    to.visit(target, nullptr, [&](const ParameterPart& target_part, const PartStates& own) {
      return copy_overlap(optimizer, {part, states, first, second}, target_part, own);
    });
    return false;
  });
}

}  // namespace ballast::offload
