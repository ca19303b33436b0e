#include "src/offload/layout.h"

#include <algorithm>
#include <array>

#include "ballast/core/dtype.h"
#include "ballast/core/error.h"
#include "ballast/cpu_adam/updater.h"

namespace ballast::offload {

namespace {

using cpu_adam::WeightChecks;
using cpu_adam::Weights;

/// Weights whose check values are compared at once.
constexpr Elems kCompared = 16 * WeightChecks::kBlock;

/// The arrays of bf16 weights from an element on.
struct SplitArrays {
  Bf16* weights;
  std::uint16_t* remainders;
  std::uint16_t* checks;
};

/// The arrays of fp16 weights from an element on.
struct CopyArrays {
  float* master;
  F16* weights;
};

bool is_split(const PartStates& states) {
  return states.shard.weights.format == Weights::Format::split;
}

bool is_copy(const PartStates& states) {
  return states.shard.weights.format == Weights::Format::copy_f16;
}

SplitArrays split_arrays(const PartStates& states, Elems first = 0) {
  auto* const weights = static_cast<Bf16*>(states.shard.weights.main);
  auto* const remainders = static_cast<std::uint16_t*>(states.shard.weights.remainder_or_copy);
  return {weights == nullptr ? nullptr : weights + first, remainders + first,
          states.checks + WeightChecks::values_of(first)};
}

CopyArrays copy_arrays(const PartStates& states, Elems first = 0) {
  auto* const weights = static_cast<F16*>(states.shard.weights.remainder_or_copy);
  return {static_cast<float*>(states.shard.weights.main) + first,
          weights == nullptr ? nullptr : weights + first};
}

/// Calls `work(element)` for each weight whose check value differs from that in `at`.
void for_changed(const SplitArrays& at, Elems count, const auto& work) {
  std::array<std::uint16_t, WeightChecks::values_of(kCompared)> checks;
  for (Elems first = 0; first < count; first += kCompared) {
    const Elems size = std::min(kCompared, count - first);
    const std::uint16_t* const old = at.checks + WeightChecks::values_of(first);
    cpu_adam::compute_checks(at.weights + first, size, checks.data());
    if (std::equal(old, old + WeightChecks::values_of(size), checks.data())) continue;
    for (Elems i = 0; i < size; ++i) {
      const Elems check =
          i / WeightChecks::kBlock * WeightChecks::kColumns + i % WeightChecks::kColumns;
      if (checks.at(check) != old[check]) work(first + i);
    }
  }
}

/// Splits a master into remainders and the weights it rounds to, with their check values.
void split_values(std::span<const float> values, const SplitArrays& to) {
  for (Elems i = 0; i < values.size(); ++i) {
    const SplitMaster split = split_master(values[i]);
    to.weights[i] = split.weight;
    to.remainders[i] = split.remainder;
  }
  cpu_adam::compute_checks(to.weights, values.size(), to.checks);
}

}  // namespace

PartStates part_of(const PartStates& states, Elems first, Elems count) {
  return {cpu_adam::part_of(states.shard, first, count),
          states.checks == nullptr ? nullptr : states.checks + WeightChecks::values_of(first)};
}

void follow_weights(const PartStates& states, Elems first, Elems count) {
  if (is_split(states)) {
    const SplitArrays at = split_arrays(states, first);
    for_changed(at, count, [&](Elems i) { at.remainders[i] = 0; });
  } else if (is_copy(states)) {
    const CopyArrays at = copy_arrays(states, first);
    for (Elems i = 0; i < count; ++i) {
      if (to_f16(at.master[i]) != at.weights[i]) at.master[i] = to_float(at.weights[i]);
    }
  }
}

void note_weights(const PartStates& states, Elems first, Elems count) {
  if (!is_split(states)) return;
  const SplitArrays at = split_arrays(states, first);
  cpu_adam::compute_checks(at.weights, count, at.checks);
}

void forget_master(const PartStates& states) {
  if (is_split(states)) {
    std::fill_n(split_arrays(states).remainders, states.shard.size, std::uint16_t{0});
  } else if (is_copy(states)) {
    std::fill_n(copy_arrays(states).master, states.shard.size, 0.0F);
  }
}

void read_master(const PartStates& states, std::span<float> out) {
  if (is_split(states)) {
    const SplitArrays at = split_arrays(states);
    for (Elems i = 0; i < out.size(); ++i) out[i] = join_master({at.weights[i], at.remainders[i]});
    for_changed(at, out.size(), [&](Elems i) { out[i] = to_float(at.weights[i]); });
  } else if (is_copy(states)) {
    const CopyArrays at = copy_arrays(states);
    for (Elems i = 0; i < out.size(); ++i) {
      const bool kept = to_f16(at.master[i]) == at.weights[i];
      out[i] = kept ? at.master[i] : to_float(at.weights[i]);
    }
  }
}

void write_master(const PartStates& states, std::span<const float> values, NewMaster mode) {
  const bool sets_weights = mode == NewMaster::sets_weights;
  if (is_split(states)) {
    const SplitArrays at = split_arrays(states);
    if (sets_weights) return split_values(values, at);
    std::array<Bf16, WeightChecks::kBlock> weights = {};
    for (Elems i = 0; i < values.size(); i += WeightChecks::kBlock) {
      const Elems count = std::min(WeightChecks::kBlock, values.size() - i);
      split_values(values.subspan(i, count),
                   {weights.data(), at.remainders + i, at.checks + WeightChecks::values_of(i)});
    }
  } else if (is_copy(states)) {
    const CopyArrays at = copy_arrays(states);
    std::ranges::copy(values, at.master);
    if (!sets_weights) return;
    for (Elems i = 0; i < values.size(); ++i) at.weights[i] = to_f16(values[i]);
  }
}

void copy_master(const PartStates& from, const PartStates& to) {
  const Elems size = from.shard.size;
  if (is_split(from)) {
    std::copy_n(split_arrays(from).remainders, size, split_arrays(to).remainders);
    std::copy_n(from.checks, WeightChecks::values_of(size), to.checks);
  } else if (is_copy(from)) {
    std::copy_n(copy_arrays(from).master, size, copy_arrays(to).master);
  }
}

namespace {

using cpu_adam::Codes;
using cpu_adam::Moments;

/// `array` from element `first` on; null stays null.
std::byte* from(const void* array, Elems first, DType type) {
  auto* const at = static_cast<std::byte*>(const_cast<void*>(array));
  return at == nullptr ? nullptr : at + first * size_of(type);
}

}  // namespace

OffloadLayout::OffloadLayout(cpu_adam::Optimizer optimizer, Moments::Format moments,
                             const std::vector<Parameter>& parameters, Elems largest)
    : optimizer_(optimizer), moments_(moments), largest_(largest) {
  expects(largest > 0 && largest % Codes::kBlock == 0, "optimizer states: size of a sub-group");
  add(parameters);
}

void OffloadLayout::add(const std::vector<Parameter>& parameters) {
  Elems free = 0;
  for (const Parameter& parameter : parameters) {
    const Elems next =
        parameters_.empty()
            ? 0
            : first_elements_.back() + round_up(parameters_.back().elements, Codes::kBlock);
    const Elems first = parameter.first_element.value_or(next);
    expects(first % Codes::kBlock == 0, "optimizer states: number of a first element");
    first_elements_.push_back(first);
    parameters_.push_back(parameter);
    add_parts(parameters_.size() - 1, free);
  }
  for (OffloadSubGroup& group : sub_groups_) group.bytes = round_up(group.bytes, kPage);
}

void OffloadLayout::add_parts(std::size_t parameter, Elems& free) {
  const Parameter& all = parameters_[parameter];
  Elems first = 0;
  do {
    if (free == 0) {
      sub_groups_.emplace_back();
      free = largest_;
    }
    if (first == 0) first_sub_groups_.push_back(sub_groups_.size() - 1);
    OffloadSubGroup& group = sub_groups_.back();
    const Elems count = std::min(all.elements - first, free);
    group.parts.push_back({parameter, first, count, group.bytes});
    group.bytes += arrays(all.type, count).end;
    first += count;
    free -= std::min(free, round_up(std::max(count, Elems{1}), Codes::kBlock));
  } while (first < all.elements);
}

OffloadLayout::Arrays OffloadLayout::arrays(DType type, Elems count) const {
  Arrays at;
  Bytes end = 0;
  // Large arrays must not be at distances of a power of two: see kArraySkew.
  const auto add = [&](Bytes bytes) {
    if (bytes == 0) return end;
    const Bytes skew = bytes >= 64 * kPage ? cpu_adam::kArraySkew : 0;
    const Bytes start = end + skew;
    end = round_up(start + bytes, kCacheLine);
    return start;
  };
  const auto sizes = cpu_adam::traffic(optimizer_, Weights::format_of(type), type, moments_);
  const bool blockwise = moments_ == Moments::Format::blockwise8;
  const Elems exponents = blockwise ? Codes::exponents_of(count) : 0;
  at.remainder_or_copy = add(count * Weights::master_width(type));
  at.checks = add(type == DType::bf16 ? WeightChecks::values_of(count) * sizeof(std::uint16_t) : 0);
  at.first = add(count * sizes.first_moment);
  at.first_exponents = add(sizes.first_moment > 0 ? exponents : 0);
  at.second = add(count * sizes.second_moment);
  at.second_exponents = add(sizes.second_moment > 0 ? exponents : 0);
  at.end = end;
  return at;
}

Bytes OffloadLayout::bytes() const {
  Bytes sum = 0;
  for (const OffloadSubGroup& group : sub_groups_) sum += group.bytes;
  return sum;
}

PartStates OffloadLayout::part_states(const ParameterPart& part, HostBytes states, void* weights,
                                      const cpu_adam::Gradient& gradient) const {
  const Parameter& parameter = parameters_.at(part.parameter);
  const Arrays at = arrays(parameter.type, part.count);
  std::byte* base = states.data() + part.offset;
  const auto exponents = [&](Bytes offset) {
    const bool blockwise = moments_ == Moments::Format::blockwise8;
    return blockwise ? reinterpret_cast<std::uint8_t*>(base + offset) : nullptr;
  };
  const bool has_checks = parameter.type == DType::bf16;
  return {{Weights::of(parameter.type, from(weights, part.first, parameter.type),
                       base + at.remainder_or_copy),
           {moments_, base + at.first, base + at.second, exponents(at.first_exponents),
            exponents(at.second_exponents)},
           {gradient.type, from(gradient.data, part.first, gradient.type)},
           part.count,
           first_elements_.at(part.parameter) + part.first},
          has_checks ? reinterpret_cast<std::uint16_t*>(base + at.checks) : nullptr};
}

}  // namespace ballast::offload
