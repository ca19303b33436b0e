#include "src/offload/layout.h"

#include <algorithm>

#include "ballast/core/error.h"
#include "ballast/cpu_adam/traffic.h"

namespace ballast::offload {
namespace {

using cpu_adam::Codes;
using cpu_adam::Moments;
using cpu_adam::Weights;

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
  at.checks = add(type == DType::bf16 ? checks_of(count) * sizeof(std::uint16_t) : 0);
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
