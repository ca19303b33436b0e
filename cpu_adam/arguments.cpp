#include "cpu_adam/arguments.h"

#include <cmath>

#include "ballast/core/error.h"

#include "cpu_adam/kernel_rules.h"

namespace ballast::cpu_adam {

namespace {

/// The finaliser of SplitMix64. Source: Steele, Lea & Flood, "Fast splittable pseudorandom number
/// generators", OOPSLA 2014, section 4.
std::uint64_t mix(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
  return x ^ (x >> 31);
}

/// Rounds the scalars for kernels. Rules that can interpolate from the gradient do so where it is
/// nearer, like torch.lerp.
Coefficients rounded_scalars(const Scalars<double>& exact, bool may_start_from_end) {
  const auto number = [](double value) { return static_cast<float>(value); };
  Coefficients k{{.gradient_scale = number(exact.gradient_scale),
                  .decay = number(exact.decay),
                  .l2 = number(exact.l2),
                  .first_weight = number(exact.first_weight),
                  .second_decay = number(exact.second_decay),
                  .second_weight = number(exact.second_weight),
                  .epsilon = number(exact.epsilon),
                  .step_size = number(exact.step_size),
                  .momentum = number(exact.momentum),
                  .nesterov = exact.nesterov},
                 {},
                 {}};
  k.first_from_end = may_start_from_end && k.first_weight >= 0.5F;
  if (k.first_from_end) k.first_weight -= 1.0F;
  return k;
}

}  // namespace

Scalars<double> exact_scalars(const Hyper& hyper) {
  Scalars<double> k = {.gradient_scale = hyper.gradient_scale,
                       .decay = 1.0 - hyper.learning_rate * hyper.weight_decay,
                       .l2 = hyper.weight_decay,
                       .first_weight = 1.0 - hyper.beta1,
                       .second_decay = hyper.beta2,
                       .second_weight = 1.0 - hyper.beta2,
                       .epsilon = hyper.epsilon,
                       .step_size = -hyper.learning_rate,
                       .momentum = hyper.momentum,
                       .nesterov = hyper.nesterov};
  const auto step = static_cast<double>(hyper.step);
  const BiasCorrections corrections = {1.0 - std::pow(hyper.beta1, step),
                                       std::sqrt(1.0 - std::pow(hyper.beta2, step))};
  with_rule(hyper.optimizer, [&]<class Rule>(Rule) {
    if constexpr (requires { Rule::correct(k, corrections); }) Rule::correct(k, corrections);
  });
  return k;
}

Coefficients coefficients_of(const Hyper& hyper) {
  const bool may_start_from_end = with_rule(hyper.optimizer, []<class Rule>(Rule) {
    return requires {
      typename Rule::FromGradient;
    };
  });
  return rounded_scalars(exact_scalars(hyper), may_start_from_end);
}

void key_draws(Coefficients& coefficients, std::int64_t step, std::uint32_t upper_element) {
  constexpr std::uint64_t kGolden = 0x9e3779b97f4a7c15U;
  const std::uint64_t key = mix(mix(static_cast<std::uint64_t>(step) * kGolden) + upper_element);
  coefficients.draw_key[0] = static_cast<std::uint32_t>(key);
  coefficients.draw_key[1] = static_cast<std::uint32_t>(key >> 32);
}

namespace {

/// The address of element `start`; null when the array is not used (element_bytes 0) or absent.
void* from_element(const void* array, std::size_t element_bytes, Elems start) {
  if (element_bytes == 0 || array == nullptr) return nullptr;
  return static_cast<std::byte*>(const_cast<void*>(array)) + start * element_bytes;
}

}  // namespace

ElementSizes sizes_of(Optimizer optimizer, Weights::Format weights, DType gradient,
                      Moments::Format moments) {
  const bool split = weights == Weights::Format::split;
  const bool blockwise = moments == Moments::Format::blockwise8;
  const std::size_t first = blockwise ? 1 : moments == Moments::Format::bf16_first ? 2 : 4;
  return {.main = split ? 2U : 4U,
          .remainder_or_copy = weights == Weights::Format::plain ? 0U : 2U,
          .first = has_first_moment(optimizer) ? first : 0,
          .second = has_second_moment(optimizer) ? (blockwise ? 1U : 4U) : 0,
          .gradient = size_of(gradient),
          .loads_remainder = split};
}

ElementSizes sizes_of(Optimizer optimizer, const Shard& shard) {
  return sizes_of(optimizer, shard.weights.format, shard.gradient.type, shard.moments.format);
}

void require_complete(Optimizer optimizer, const Shard& shard) {
  const ElementSizes sizes = sizes_of(optimizer, shard);
  const bool blockwise = shard.moments.format == Moments::Format::blockwise8;
  const auto present = [](std::size_t element_bytes, const void* array) {
    return element_bytes == 0 || array != nullptr;
  };
  const Moments& moments = shard.moments;
  const bool exponents = !blockwise || (present(sizes.first, moments.first_exponents) &&
                                        present(sizes.second, moments.second_exponents));
  expects(shard.weights.main != nullptr &&
              present(sizes.remainder_or_copy, shard.weights.remainder_or_copy) &&
              present(sizes.first, moments.first) && present(sizes.second, moments.second) &&
              exponents && shard.gradient.data != nullptr,
          "optimizer update: a non-empty shard has a null pointer");
  expects(!blockwise || shard.first_element % Codes::kBlock == 0,
          "optimizer update: a shard with 8-bit moments must start at a multiple of 256 elements");
}

void require_complete(const Hyper& hyper, const Shard& shard) {
  expects(hyper.step >= 1, "optimizer update: the step must be at least 1");
  if (shard.size != 0) require_complete(hyper.optimizer, shard);
}

Moments::Format format_of_moments(Optimizer optimizer, const Shard& shard) {
  const Moments::Format format = shard.moments.format;
  const bool only_second = format == Moments::Format::bf16_first && !has_first_moment(optimizer);
  return only_second ? Moments::Format::f32 : format;
}

std::uint8_t undecayed_in_block(std::span<const ElementRange> undecayed, Elems element) {
  unsigned bits = 0;
  for (unsigned i = 0; i < Codes::kBlock / Shard::kDecayStep; ++i) {
    const Elems number = element + i * Shard::kDecayStep;
    const auto has_number = [number](const ElementRange& range) {
      return range.first <= number && number < range.end;
    };
    if (std::ranges::any_of(undecayed, has_number)) bits |= 1U << i;
  }
  return static_cast<std::uint8_t>(bits);
}

Streams piece_of(Optimizer optimizer, const Shard& shard, Elems start, Elems count) {
  const ElementSizes sizes = sizes_of(optimizer, shard);
  const Moments& moments = shard.moments;
  const Elems block = start / Codes::kBlock;
  const auto exponents = [block](std::uint8_t* array, std::size_t element_bytes) {
    return array == nullptr || element_bytes == 0 ? nullptr : array + block;
  };
  return {.main = from_element(shard.weights.main, sizes.main, start),
          .remainder_or_copy =
              from_element(shard.weights.remainder_or_copy, sizes.remainder_or_copy, start),
          .first = from_element(moments.first, sizes.first, start),
          .second = from_element(moments.second, sizes.second, start),
          .first_exponents = exponents(moments.first_exponents, sizes.first),
          .second_exponents = exponents(moments.second_exponents, sizes.second),
          .gradient = from_element(shard.gradient.data, sizes.gradient, start),
          .main_bytes = sizes.main,
          .remainder_or_copy_bytes = sizes.remainder_or_copy,
          .gradient_bytes = sizes.gradient,
          .size = count,
          .element = static_cast<std::uint32_t>(shard.first_element + start),
          .undecayed = 0};
}

Shard part_of(const Shard& shard, Elems first, Elems count) {
  expects(first <= shard.size && count <= shard.size - first,
          "optimizer update: the part is outside its shard");
  // Uses Adam's pieces, which have both moments.
  const Streams streams = piece_of(Optimizer::adam, shard, first, count);
  Shard part = shard;
  part.weights.main = streams.main;
  part.weights.remainder_or_copy = streams.remainder_or_copy;
  part.moments.first = streams.first;
  part.moments.second = streams.second;
  part.moments.first_exponents = streams.first_exponents;
  part.moments.second_exponents = streams.second_exponents;
  part.gradient.data = streams.gradient;
  part.size = count;
  part.first_element = shard.first_element + first;
  return part;
}

std::vector<TouchedArray> touched_arrays(Optimizer optimizer, const Shard& shard, Elems start) {
  const ElementSizes sizes = sizes_of(optimizer, shard);
  std::vector<TouchedArray> arrays;
  const auto add = [&](void* array, std::size_t element_bytes, bool load, bool store) {
    if (element_bytes == 0) return;
    arrays.push_back({static_cast<std::byte*>(array) + start * element_bytes,
                      element_bytes * Codes::kBlock, load, store});
  };
  add(shard.weights.main, sizes.main, true, true);
  add(shard.weights.remainder_or_copy, sizes.remainder_or_copy, sizes.loads_remainder, true);
  add(shard.moments.first, sizes.first, true, true);
  add(shard.moments.second, sizes.second, true, true);
  add(const_cast<void*>(shard.gradient.data), sizes.gradient, true, false);
  return arrays;
}

}  // namespace ballast::cpu_adam
