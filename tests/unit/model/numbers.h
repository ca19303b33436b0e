#pragma once

#include <cmath>
#include <cstdint>
#include <functional>
#include <vector>

#include "ballast/core/random.h"

namespace ballast::test {

/// `size` normal numbers with this deviation, equal for equal seeds.
template <class T = double>
std::vector<T> normals(std::size_t size, std::uint64_t seed, double deviation = 1.0,
                       double mean = 0.0) {
  std::vector<T> out(size);
  for (std::size_t i = 0; i < size; ++i) {
    out[i] = static_cast<T>(mean + deviation * random_normal(seed, i));
  }
  return out;
}

/// (f(x + h e_i) - f(x - h e_i)) / 2h; f reads `x`.
template <class T>
double central_difference(const std::function<double()>& f, T& x, double h = 1e-5) {
  const T before = x;
  x = before + static_cast<T>(h);
  const double above = f();
  x = before - static_cast<T>(h);
  const double below = f();
  x = before;
  return (above - below) / (2.0 * h);
}

/// |a - b| / |b| over vectors.
template <class A, class B>
double relative_error(const std::vector<A>& a, const std::vector<B>& b) {
  double difference = 0.0;
  double size = 0.0;
  for (std::size_t i = 0; i < b.size(); ++i) {
    const double d = static_cast<double>(a[i]) - static_cast<double>(b[i]);
    difference += d * d;
    size += static_cast<double>(b[i]) * static_cast<double>(b[i]);
  }
  return std::sqrt(difference / (size > 0.0 ? size : 1.0));
}

inline double dot(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

}  // namespace ballast::test
