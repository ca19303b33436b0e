#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <utility>
#include <vector>

#include "states.h"

namespace ballast::cpu_adam::test {

inline constexpr std::size_t kHalf = 0x10000;  // patterns of 16 bits

/// Lion without a gradient and with a rate of zero, which passes the weight through the kernel
/// unchanged.
inline constexpr Hyper kKeepWeights{.optimizer = Optimizer::lion, .learning_rate = 0.0};

/// Masters with the given high halves and all low halves, in the split format of core/dtype.h.
class Masters {
 public:
  explicit Masters(std::vector<std::uint16_t> highs)
      : highs_(std::move(highs)), states_({Optimizer::lion}, highs_.size() * kHalf) {
    for (std::size_t i = 0; i < states_.size; ++i) {
      states_.remainder_or_copy.as<std::uint16_t>()[i] = static_cast<std::uint16_t>(i);
    }
    expected_weights_.resize(states_.size);
    std::iota(lows_.begin(), lows_.end(), std::uint16_t{0});
  }

  /// Replaces the high halves by an equal number of others.
  void set_highs(const std::vector<std::uint16_t>& highs) { highs_ = highs; }

  /// 0 when no master changes in one update with `updater`.
  std::size_t changed_by(const Updater& updater) {
    std::size_t wrong = 0;
    for (std::size_t block = 0; block < highs_.size(); ++block) fill(block);
    updater.step(kKeepWeights, states_.shard());
    for (std::size_t block = 0; block < highs_.size(); ++block) wrong += wrong_in(block);
    return wrong;
  }

 private:
  static bool ordinary(std::uint16_t high) { return (high & 0x7fffU) < 0x7f80U; }
  static float master(std::uint16_t high, std::size_t low) {
    return std::bit_cast<float>((std::uint32_t{high} << 16) | static_cast<std::uint32_t>(low));
  }

  void fill(std::size_t block) {
    const std::uint16_t high = highs_[block];
    Bf16* weights = expected_weights_.data() + block * kHalf;
    // The weight changes in the middle of the low halves; infinity and NaNs need a separate
    // comparison.
    std::fill_n(weights, kHalf / 2, split_master(master(high, 0)).weight);
    std::fill_n(weights + kHalf / 2, kHalf / 2, split_master(master(high, kHalf / 2)).weight);
    if (!ordinary(high)) {
      for (std::size_t low = 0; low < kHalf; ++low) {
        weights[low] = split_master(master(high, low)).weight;
      }
    }
    std::memcpy(states_.main.as<Bf16>() + block * kHalf, weights, kHalf * sizeof *weights);
  }

  std::size_t wrong_in(std::size_t block) {
    const Bf16* expected = expected_weights_.data() + block * kHalf;
    const Bf16* weights = states_.main.as<Bf16>() + block * kHalf;
    auto* remainders = states_.remainder_or_copy.as<std::uint16_t>() + block * kHalf;
    std::size_t wrong = 0;
    if (ordinary(highs_[block])) {
      wrong += std::memcmp(weights, expected, kHalf * sizeof *weights) == 0 ? 0 : 1;
      wrong += std::memcmp(remainders, lows_.data(), kHalf * sizeof *remainders) == 0 ? 0 : 1;
      return wrong;
    }
    for (std::size_t low = 0; low < kHalf; ++low) {
      const bool nan = std::isnan(master(highs_[block], low));
      const bool same = weights[low] == expected[low] && remainders[low] == low;
      wrong += nan ? (is_nan(weights[low]) ? 0 : 1) : (same ? 0 : 1);
      remainders[low] = static_cast<std::uint16_t>(low);
    }
    return wrong;
  }

  std::vector<std::uint16_t> highs_;
  States states_;
  std::vector<Bf16> expected_weights_;
  std::vector<std::uint16_t> lows_ = std::vector<std::uint16_t>(kHalf);
};

}  // namespace ballast::cpu_adam::test
