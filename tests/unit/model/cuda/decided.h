#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "src/model/compute/routing.h"
#include "tests/support/device_array.h"
#include "tests/unit/model/cuda/host_ops.h"
#include "tests/unit/model/cuda/values.h"

namespace ballast::test {

using model::RouterBiases;
using model::RouterShape;
using model::Routing;

/// Whether the router chooses by corrected scores.
inline bool is_corrected(const RouterShape& shape) {
  return shape.sigmoid || shape.least_sum > 0.0;
}
/// Number of values of a router's biases: of its logits, or addends of corrections.
inline std::size_t biases_in(const RouterShape& shape) {
  return shape.experts * (is_corrected(shape) ? model::kAddends : 1);
}
inline RouterBiases<float> biases_at(const RouterShape& shape, const float* values) {
  return is_corrected(shape) ? RouterBiases<float>{.correction = values}
                             : RouterBiases<float>{.logits = values};
}

/// Decisions of a router, on the host.
struct Decided {
  std::vector<float> probabilities;
  std::vector<float> log_sums;
  std::vector<float> weights;
  std::vector<float> weight_gradients;
  std::vector<std::int32_t> chosen;
  std::vector<std::int32_t> places;
  std::vector<std::int32_t> starts;

  explicit Decided(const RouterShape& shape)
      : probabilities(shape.rows * shape.experts),
        log_sums(shape.rows),
        weights(shape.choices()),
        weight_gradients(normals_of<float>(shape.choices(), 5)),
        chosen(shape.choices()),
        places(shape.choices()),
        starts(shape.experts + 1) {}
  Decided(const RouterShape& shape, std::vector<float> logits,
          const std::vector<float>& biases = {}, const std::vector<std::int32_t>& targets = {})
      : Decided(shape) {
    host_ops<float>().routers->route(
        shape, logits.data(), biases_at(shape, biases.empty() ? nullptr : biases.data()),
        targets.empty() ? nullptr : targets.data(), routing(), starts.data());
  }
  Routing routing() {
    return {probabilities.data(),    log_sums.data(), weights.data(),
            weight_gradients.data(), chosen.data(),   places.data()};
  }
};

/// Decisions of a router, on the device.
struct Uploaded {
  DeviceArray<float> probabilities;
  DeviceArray<float> log_sums;
  DeviceArray<float> weights;
  DeviceArray<float> weight_gradients;
  DeviceArray<std::int32_t> chosen;
  DeviceArray<std::int32_t> places;

  explicit Uploaded(const Decided& from)
      : probabilities(from.probabilities),
        log_sums(from.log_sums),
        weights(from.weights),
        weight_gradients(from.weight_gradients),
        chosen(from.chosen),
        places(from.places) {}
  [[nodiscard]] Routing routing() const {
    return {probabilities.data(),    log_sums.data(), weights.data(),
            weight_gradients.data(), chosen.data(),   places.data()};
  }
};

/// The logits after a row's end must not matter.
template <class Logit>
std::vector<float> logits_of(const RouterShape& shape, const Logit& logit) {
  std::vector<float> logits(shape.rows * shape.step());
  for (std::size_t i = 0; i < logits.size(); ++i) {
    const std::size_t expert = i % shape.step();
    logits[i] = expert < shape.experts ? logit(i / shape.step(), expert)
                : i % 2 == 0           ? std::numeric_limits<float>::quiet_NaN()
                                       : 1e30F;
  }
  return logits;
}
inline std::vector<float> random_logits(const RouterShape& shape, double deviation = 3.0) {
  const auto normals = normals_of<float>(shape.rows * shape.experts, 1, deviation);
  return logits_of(shape, [&](std::size_t row, std::size_t expert) {
    return normals[row * shape.experts + expert];
  });
}

}  // namespace ballast::test
