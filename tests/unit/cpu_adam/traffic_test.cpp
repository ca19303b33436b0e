#include <array>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/cpu_adam/updater.h"

#include "cpu_adam/arguments.h"

namespace ballast::cpu_adam::traffic_test {
namespace {

using WeightsFormat = Weights::Format;
using MomentsFormat = Moments::Format;

TEST(Traffic, OfTheDefaultLayoutIsTwentySixBytes) {
  const Traffic t =
      traffic(Optimizer::adamw, WeightsFormat::split, DType::bf16, MomentsFormat::f32);
  EXPECT_EQ(t.formula(), "read w2 r2 m4 v4 g2 + write w2 r2 m4 v4 = 26 bytes/parameter");
  EXPECT_EQ(t.bytes_per_element(), 26U);
  EXPECT_EQ(t.stored_per_element(), 14U);
}

TEST(Traffic, CountsACopyOnce) {
  const Traffic t =
      traffic(Optimizer::adamw, WeightsFormat::copy_bf16, DType::bf16, MomentsFormat::f32);
  EXPECT_EQ(t.formula(), "read w4 m4 v4 g2 + write w4 c2 m4 v4 = 28 bytes/parameter");
  EXPECT_EQ(t.stored_per_element(), 16U);
}

TEST(Traffic, LeavesOutWhatTheOptimizerDoesNotKeep) {
  EXPECT_EQ(traffic(Optimizer::sgd, WeightsFormat::plain, DType::f32, MomentsFormat::f32).formula(),
            "read w4 m4 g4 + write w4 m4 = 20 bytes/parameter");
  EXPECT_EQ(
      traffic(Optimizer::adagrad, WeightsFormat::split, DType::bf16, MomentsFormat::blockwise8)
          .formula(),
      "read w2 r2 v1 g2 + write w2 r2 v1 = 12 bytes/parameter");
}

TEST(Traffic, OfACompressedFirstMomentIsFourBytesLess) {
  EXPECT_EQ(traffic(Optimizer::adamw, WeightsFormat::split, DType::bf16, MomentsFormat::bf16_first)
                .bytes_per_element(),
            22U);
}

/// A shard of these formats whose arrays have the same address, since only their sizes matter here.
Shard shard_of(WeightsFormat weights, DType gradient, MomentsFormat moments, std::byte* memory) {
  auto* floats = reinterpret_cast<float*>(memory);
  auto* bf16 = reinterpret_cast<Bf16*>(memory);
  auto* f16 = reinterpret_cast<F16*>(memory);
  auto* bytes = reinterpret_cast<std::uint8_t*>(memory);
  const std::array<Weights, 4> weight_views = {
      Weights(bf16, reinterpret_cast<std::uint16_t*>(memory)), Weights(floats),
      Weights(floats, bf16), Weights(floats, f16)};
  const std::array<Moments, 3> moment_views = {Moments(floats, floats), Moments(bf16, floats),
                                               Moments(Codes{bytes, bytes}, Codes{bytes, bytes})};
  const Gradient gradient_view = gradient == DType::f32    ? Gradient(floats)
                                 : gradient == DType::bf16 ? Gradient(bf16)
                                                           : Gradient(f16);
  return {weight_views[static_cast<std::size_t>(weights)],
          moment_views[static_cast<std::size_t>(moments)], gradient_view, Codes::kBlock};
}

TEST(Traffic, IsWhatTheCeilingTouchesForEveryLayout) {
  alignas(64) std::byte memory[64] = {};
  for (const OptimizerRow& row : kOptimizers) {
    const Optimizer optimizer = row.type;
    for (const auto weights : {WeightsFormat::split, WeightsFormat::plain, WeightsFormat::copy_bf16,
                               WeightsFormat::copy_f16}) {
      for (const auto gradient : {DType::bf16, DType::f16, DType::f32}) {
        for (const auto moments :
             {MomentsFormat::f32, MomentsFormat::bf16_first, MomentsFormat::blockwise8}) {
          const Shard shard = shard_of(weights, gradient, moments, memory);
          Bytes touched = 0;
          for (const TouchedArray& array : touched_arrays(optimizer, shard, 0)) {
            touched += array.row_bytes * (Bytes{array.load} + Bytes{array.store});
          }
          const Traffic t = traffic(optimizer, weights, gradient, moments);
          EXPECT_EQ(t.bytes_per_element() * Codes::kBlock, touched) << t.formula();
        }
      }
    }
  }
}

}  // namespace
}  // namespace ballast::cpu_adam::traffic_test
