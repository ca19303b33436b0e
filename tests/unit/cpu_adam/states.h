#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "ballast/cpu_adam/adamw.h"

namespace ballast::cpu_adam::test {

inline bool is_nan(Bf16 value) {
  return (value.bits & 0x7fffU) > 0x7f80U;
}

/// Numbers of many magnitudes.
class Numbers {
 public:
  explicit Numbers(std::uint32_t seed) : generator_(seed) {}
  float any(int lowest, int highest) {
    std::uniform_real_distribution<float> mantissa(-1.0F, 1.0F);
    std::uniform_int_distribution<int> exponent(lowest, highest);
    const float number = mantissa(generator_);
    return std::ldexp(number, exponent(generator_));
  }

 private:
  std::mt19937 generator_;
};

/// Owns the arrays of one shard in both forms; `offset` elements lie before it and 40 behind it, so
/// that a test sees what is written outside.
struct States {
  std::size_t offset = 0;
  std::size_t size = 0;
  std::vector<Bf16> weight;
  std::vector<std::uint16_t> remainder;
  std::vector<float> master, first, second, gradient;
  std::vector<Bf16> gradient16;

  States(std::size_t elements, std::uint32_t seed, std::size_t shift = 0)
      : offset(shift), size(elements) {
    Numbers numbers(seed);
    for (std::size_t i = 0; i < size + offset + 40; ++i) {
      add(numbers.any(-8, 2), numbers.any(-12, 0), std::fabs(numbers.any(-20, 0)),
          numbers.any(-12, 2));
    }
  }

  /// Appends one element; used alone, only through `States(0, 0)` cleared first.
  void add(float p, float m, float v, float g) {
    const SplitMaster split = split_master(p);
    master.push_back(p);
    weight.push_back(split.weight);
    remainder.push_back(split.remainder);
    first.push_back(m);
    second.push_back(v);
    gradient.push_back(g);
    gradient16.push_back(to_bf16(g));
  }

  SplitShard split() {
    return {weight.data() + offset, remainder.data() + offset,  first.data() + offset,
            second.data() + offset, gradient16.data() + offset, size};
  }
  PlainShard plain() {
    return {master.data() + offset, first.data() + offset, second.data() + offset,
            gradient.data() + offset, size};
  }
};

/// Index of the first float whose bits differ (two NaNs are equal), or -1.
inline std::ptrdiff_t first_difference(const std::vector<float>& a, const std::vector<float>& b) {
  for (std::size_t i = 0; i < a.size(); ++i) {
    const bool same = std::bit_cast<std::uint32_t>(a[i]) == std::bit_cast<std::uint32_t>(b[i]);
    if (!same && !(std::isnan(a[i]) && std::isnan(b[i]))) return static_cast<std::ptrdiff_t>(i);
  }
  return -1;
}

/// What differs between the states, or "". All elements count, those outside the shard too. Two
/// NaNs are equal whatever their payload, and so are the remainders of two NaN weights.
inline std::string difference(const States& a, const States& b) {
  const auto at = [](const char* what, std::ptrdiff_t i) {
    return std::string(what) + " " + std::to_string(i);
  };
  if (const auto i = first_difference(a.master, b.master); i >= 0) return at("master", i);
  if (const auto i = first_difference(a.first, b.first); i >= 0) return at("first moment", i);
  if (const auto i = first_difference(a.second, b.second); i >= 0) return at("second moment", i);
  for (std::size_t i = 0; i < a.weight.size(); ++i) {
    if (is_nan(a.weight[i]) && is_nan(b.weight[i])) continue;
    if (a.weight[i] != b.weight[i]) return at("weight", static_cast<std::ptrdiff_t>(i));
    if (a.remainder[i] != b.remainder[i]) return at("remainder", static_cast<std::ptrdiff_t>(i));
  }
  return "";
}

/// Typical hyper-parameters with every term switched on.
inline AdamW hyper_at(std::int64_t step) {
  return {.learning_rate = 2e-3,
          .beta1 = 0.9,
          .beta2 = 0.95,
          .epsilon = 1e-8,
          .weight_decay = 0.1,
          .step = step,
          .gradient_scale = 0.37F};
}

/// The distance from |x| to the next larger float.
inline double ulp(double x) {
  const auto magnitude = static_cast<float>(std::fabs(x));
  return static_cast<double>(std::nextafter(magnitude, INFINITY)) - static_cast<double>(magnitude);
}

}  // namespace ballast::cpu_adam::test
