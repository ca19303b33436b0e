#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace ballast {

/// Classes of attention kernels, and of recurrences that take the place of attention. Each class
/// has its own speed on GPUs, so rates and plans distinguish them.
enum class AttentionClass : std::uint8_t {
  heads_128,   ///< bf16, heads up to 128
  heads_192,   ///< bf16, heads of 129 to 192: latent attention of DeepSeek's form, values padded
  heads_256,   ///< bf16, heads of 193 to 256
  plain,       ///< without tensor cores: wider heads, and types other than bf16
  capped_128,  ///< bf16, heads up to 128, with soft caps
  capped_256,  ///< bf16, heads of 129 to 256, with soft caps
  recurrence   ///< the rule of gated delta nets
};

/// A row of kAttentionClasses.
struct AttentionClassInfo {
  AttentionClass id;
  std::string_view key;   ///< keys of rates files: KEY_forward_tflops, KEY_backward_tflops
  std::string_view what;  ///< for messages
  /// FLOPs of a backward pass for each FLOP that a plan counts, which is twice the forward pass.
  /// Attention recomputes the scores: five products instead of four.
  double backward_products;
  /// The class whose rates, times `forward` and `backward`, stand for missing ones. The shares are
  /// the smallest of the files in configs/rates.
  AttentionClass substitute;
  double forward;
  double backward;

  /// FLOPs of a backward pass for each FLOP of the forward pass.
  [[nodiscard]] constexpr double backward_flops() const { return 2.0 * backward_products; }
};

inline constexpr std::size_t kAttentionClassCount = 7;

/// One row per class, in the order of AttentionClass. A class follows its substitute.
inline constexpr std::array<AttentionClassInfo, kAttentionClassCount> kAttentionClasses = {{
    {AttentionClass::heads_128, "attention", "attention", 1.25, AttentionClass::heads_128, 1.0,
     1.0},
    {AttentionClass::heads_192, "attention_192", "attention with heads of 129 to 192", 1.25,
     AttentionClass::heads_128, 0.26, 0.19},
    {AttentionClass::heads_256, "attention_256", "attention with heads of 193 to 256", 1.25,
     AttentionClass::heads_128, 0.34, 0.26},
    {AttentionClass::plain, "attention_plain", "attention without tensor cores", 1.25,
     AttentionClass::heads_256, 0.025, 0.04},
    {AttentionClass::capped_128, "attention_capped", "attention with soft caps", 1.25,
     AttentionClass::heads_128, 0.3, 0.3},
    {AttentionClass::capped_256, "attention_capped_256",
     "attention with soft caps and heads of 129 to 256", 1.25, AttentionClass::heads_256, 0.65,
     0.63},
    {AttentionClass::recurrence, "recurrence", "recurrences of delta nets", 1.0,
     AttentionClass::heads_128, 0.025, 0.03},
}};

constexpr std::size_t index_of(AttentionClass id) noexcept {
  return static_cast<std::size_t>(id);
}
constexpr const AttentionClassInfo& info_of(AttentionClass id) noexcept {
  return kAttentionClasses[index_of(id)];
}

}  // namespace ballast
