#include "tests/unit/model/cuda/attention_reference.h"

#include <cstddef>
#include <functional>
#include <vector>

#include <gtest/gtest.h>

#include "tests/unit/model/numbers.h"

namespace ballast::test::attention_reference_test {
namespace {

using Values = std::vector<double>;

TEST(AttentionReferenceTest, DifferentiatesItself) {
  const model::AttentionShape shape{2, 5, 4, 2, 8, {}, 0.0, 1.5};
  AttentionReference reference{shape, {0.5, -1.0, 2.0, 0.0}};
  Values qkv = normals(shape.tokens() * shape.row(), 2);
  const Values dout = normals(shape.tokens() * shape.width(), 3);
  const std::function<double()> loss = [&] {
    const auto out = reference.forward(qkv).out.value;
    double sum = 0.0;
    for (std::size_t i = 0; i < out.size(); ++i) sum += out[i] * dout[i];
    return sum;
  };
  const auto gradient = reference.backward(qkv, reference.forward(qkv).out.value, dout).value;
  for (std::size_t i = 0; i < qkv.size(); i += 3) {
    const double difference = central_difference(loss, qkv[i]);
    ASSERT_NEAR(gradient[i], difference, 1e-7) << i;
  }
  const auto of_sinks = reference.of_sinks(qkv, reference.forward(qkv).out.value, dout).value;
  for (std::size_t h = 0; h < shape.heads; ++h) {
    ASSERT_NEAR(of_sinks[h], central_difference(loss, reference.sinks[h]), 1e-7) << h;
  }
}

}  // namespace
}  // namespace ballast::test::attention_reference_test
