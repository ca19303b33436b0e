#pragma once

#include <cmath>
#include <cstddef>
#include <type_traits>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/core/dtype.h"

#include "tests/unit/model/numbers.h"

namespace ballast::test {

inline double exact(double value) {
  return value;
}
inline double exact(Bf16 value) {
  return static_cast<double>(to_float(value));
}
inline double exact(F16 value) {
  return static_cast<double>(to_float(value));
}
template <class T>
std::vector<double> exact(const std::vector<T>& values) {
  std::vector<double> out;
  out.reserve(values.size());
  for (const T value : values) out.push_back(exact(value));
  return out;
}

template <class T>
T rounded(double value) {
  if constexpr (std::is_arithmetic_v<T>) {
    return static_cast<T>(value);
  } else {
    return from_float<T>(static_cast<float>(value));
  }
}
/// Normal numbers rounded to T.
template <class T>
std::vector<T> normals_of(std::size_t size, std::uint64_t seed, double deviation = 1.0,
                          double mean = 0.0) {
  std::vector<T> out;
  out.reserve(size);
  for (const double value : normals(size, seed, deviation, mean)) out.push_back(rounded<T>(value));
  return out;
}

/// The largest error of rounding a number to T, including fp32 errors before.
template <class T>
inline constexpr double kRounding = 1e-5;
template <>
inline constexpr double kRounding<Bf16> = 0x1p-8 + 1e-5;
template <>
inline constexpr double kRounding<F16> = 0x1p-11 + 1e-5;

/// Checks that each element has an error of at most kRounding of itself plus `absolute`.
template <class T>
void expect_close(const std::vector<T>& found, const std::vector<double>& expected,
                  double absolute) {
  ASSERT_EQ(found.size(), expected.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    ASSERT_NEAR(exact(found[i]), expected[i], kRounding<T> * std::abs(expected[i]) + absolute)
        << "element " << i;
  }
}

}  // namespace ballast::test
