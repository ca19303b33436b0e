#include "src/offload/layout.h"

#include <algorithm>

#include "ballast/core/error.h"

namespace ballast::offload {
namespace {

using cpu_adam::Codes;
using cpu_adam::Moments;

/// Returns the bytes per element of a moment in this format.
Bytes bytes_of_first(Moments::Format format) {
  if (format == Moments::Format::f32) return 4;
  return format == Moments::Format::bf16_first ? 2 : 1;
}
Bytes bytes_of_second(Moments::Format format) {
  return format == Moments::Format::blockwise8 ? 1 : 4;
}
/// Returns the bytes per element of the remainder or the master.
Bytes bytes_of_companion(DType type) {
  if (type == DType::f32) return 0;
  return type == DType::bf16 ? 2 : 4;
}

const void* forward(const void* array, Bytes bytes) {
  return static_cast<const std::byte*>(array) + bytes;
}

cpu_adam::Gradient gradient_from(const cpu_adam::Gradient& gradient, Elems first) {
  cpu_adam::Gradient moved = gradient;
  if (gradient.data != nullptr) moved.data = forward(gradient.data, first * size_of(gradient.type));
  return moved;
}

cpu_adam::Weights weights_at(DType type, void* weights, Elems first, std::byte* companion) {
  auto* at = static_cast<std::byte*>(weights);
  if (at != nullptr) at += first * size_of(type);
  if (type == DType::f32) return cpu_adam::Weights(reinterpret_cast<float*>(at));
  if (type == DType::bf16) {
    return {reinterpret_cast<Bf16*>(at), reinterpret_cast<std::uint16_t*>(companion)};
  }
  return {reinterpret_cast<float*>(companion), reinterpret_cast<F16*>(at)};
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
  const bool coded = moments_ == Moments::Format::blockwise8;
  const Elems exponents = coded ? Codes::exponents_of(count) : 0;
  at.companion = add(count * bytes_of_companion(type));
  if (cpu_adam::has_first_moment(optimizer_)) {
    at.first = add(count * bytes_of_first(moments_));
    at.first_exponents = add(exponents);
  }
  if (cpu_adam::has_second_moment(optimizer_)) {
    at.second = add(count * bytes_of_second(moments_));
    at.second_exponents = add(exponents);
  }
  at.end = end;
  return at;
}

Bytes OffloadLayout::bytes() const {
  Bytes sum = 0;
  for (const OffloadSubGroup& group : sub_groups_) sum += group.bytes;
  return sum;
}

cpu_adam::Shard OffloadLayout::shard(const ParameterPart& part, HostBytes states, void* weights,
                                     const cpu_adam::Gradient& gradient) const {
  const Parameter& parameter = parameters_.at(part.parameter);
  const Arrays at = arrays(parameter.type, part.count);
  std::byte* base = states.data() + part.offset;
  const auto moments = [&]() -> Moments {
    std::byte* first = base + at.first;
    std::byte* second = base + at.second;
    if (moments_ == Moments::Format::f32) {
      return {reinterpret_cast<float*>(first), reinterpret_cast<float*>(second)};
    }
    if (moments_ == Moments::Format::bf16_first) {
      return {reinterpret_cast<Bf16*>(first), reinterpret_cast<float*>(second)};
    }
    const auto bytes = [base](Bytes offset) {
      return reinterpret_cast<std::uint8_t*>(base + offset);
    };
    return {Codes{bytes(at.first), bytes(at.first_exponents)},
            Codes{bytes(at.second), bytes(at.second_exponents)}};
  };
  return {weights_at(parameter.type, weights, part.first, base + at.companion), moments(),
          gradient_from(gradient, part.first), part.count,
          first_elements_.at(part.parameter) + part.first};
}

}  // namespace ballast::offload
