#pragma once

#include <cstdint>
#include <vector>

#include "ballast/model/architecture.h"

namespace ballast::test {

/// The models in double, in the plain form of the papers, as the reference for tests of blocks.
/// Weights are a block's flat buffer.
struct Reference {
  model::ModelConfig config;
  std::size_t sequences = 0;
  std::size_t length = 0;
  std::size_t window = 0;  ///< window of attention, as in AttentionMask
  std::vector<std::int32_t> positions =
      {};  ///< positions of the tokens in their documents; empty: in their sequences

  using Values = std::vector<double>;
  [[nodiscard]] std::size_t tokens() const { return sequences * length; }
  [[nodiscard]] std::size_t position(std::size_t row) const {
    return positions.empty() ? row % length : static_cast<std::size_t>(positions[row]);
  }

  [[nodiscard]] Values embedding(const model::BlockSpec& block, const Values& weights,
                                 const std::vector<std::int32_t>& tokens) const;
  [[nodiscard]] Values layer(const model::BlockSpec& block, const Values& weights,
                             const Values& in) const;
  /// Sum of the losses of targets that are not negative. `output` is the [V, H] matrix.
  [[nodiscard]] double head(const Values& weights, const double* output, const Values& in,
                            const std::vector<std::int32_t>& targets) const;

  /// q, k, v: [tokens, heads or kv_heads, head_dim].
  [[nodiscard]] Values attention(const Values& q, const Values& k, const Values& v) const;

 private:
  [[nodiscard]] Values norm(const Values& x, const double* weight, const double* bias) const;
  void rotate(Values& x, std::size_t heads) const;
  /// Rotary frequencies of the pairs of a head, with rope_scaling dynamic, longrope or none.
  [[nodiscard]] Values frequencies(std::size_t row) const;
  /// Whether a document of this length is longer than those that the model was trained with.
  [[nodiscard]] bool is_long(double document) const;
  [[nodiscard]] Values gpt2_layer(const model::BlockSpec& block, const Values& weights,
                                  const Values& in) const;
  [[nodiscard]] Values llama_layer(const model::BlockSpec& block, const Values& weights,
                                   const Values& in) const;
};

}  // namespace ballast::test
