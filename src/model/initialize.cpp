#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <numbers>
#include <span>

#include "ballast/core/random.h"
#include "ballast/model/architecture.h"

namespace ballast::model {
namespace {

/// Four standard normal numbers from one call of the generator, by the Box-Muller transform.
std::array<double, 4> four_normals(std::uint64_t seed, std::uint64_t counter,
                                   std::uint64_t stream) {
  const auto words = philox(seed, counter, stream);
  std::array<double, 4> out{};
  for (std::size_t pair = 0; pair < 2; ++pair) {
    const double u1 = (static_cast<double>(words[2 * pair]) + 0.5) * 0x1p-32;
    const double u2 = (static_cast<double>(words[2 * pair + 1]) + 0.5) * 0x1p-32;
    const double radius = std::sqrt(-2.0 * std::log(u1));
    const double angle = 2.0 * std::numbers::pi * u2;
    out[2 * pair] = radius * std::cos(angle);
    out[2 * pair + 1] = radius * std::sin(angle);
  }
  return out;
}

/// Element i is number i mod 4 of group i / 4.
void fill_normal(const TensorSpec& tensor, std::uint64_t seed, Elems first, std::span<float> out) {
  const std::uint64_t stream = fnv1a(tensor.name);
  const auto begin = static_cast<std::int64_t>(first / 4);
  const auto end = static_cast<std::int64_t>((first + out.size() + 3) / 4);
  const double stddev = tensor.stddev;
#pragma omp parallel for schedule(static)
  for (std::int64_t group = begin; group < end; ++group) {
    const auto normals = four_normals(seed, static_cast<std::uint64_t>(group), stream);
    for (std::uint64_t k = 0; k < 4; ++k) {
      const std::uint64_t element = static_cast<std::uint64_t>(group) * 4 + k;
      if (element < first || element - first >= out.size()) continue;
      out[element - first] = static_cast<float>(stddev * normals[k]);
    }
  }
}

}  // namespace

void initialize(const TensorSpec& tensor, std::uint64_t seed, Elems first, std::span<float> out) {
  switch (tensor.init) {
    case Init::zeros:
      std::fill(out.begin(), out.end(), 0.0F);
      return;
    case Init::ones:
      std::fill(out.begin(), out.end(), 1.0F);
      return;
    case Init::normal:
      fill_normal(tensor, seed, first, out);
      return;
  }
}

}  // namespace ballast::model
