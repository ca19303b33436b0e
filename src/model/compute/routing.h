#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "ballast/core/memory.h"
#include "ballast/model/architecture.h"
#include "ballast/model/kernels.h"

namespace ballast::model {

/// Instead of an expert: a padding row is sent to none.
inline constexpr std::int32_t kNoExpert = -1;

/// Routing rule. The scores of experts are the softmax of all logits or, with sigmoid, the sigmoid
/// of each. The `per_token` experts with the largest score plus correction
/// (RouterBiases::correction) are chosen, and weighted by their score alone. If
/// there are several groups of consecutive experts, only those of the best `kept_groups` groups can
/// be chosen. A group is as good as the sum of its two best corrected scores (DeepSeek-AI,
/// "DeepSeek-V3", 2024, equations 12 to 16). Ties go to the lower number.
struct RouterShape {
  std::size_t rows = 0;  ///< tokens of a micro-batch, N
  std::size_t experts = 0;
  std::size_t per_token = 0;  ///< K
  bool renormalises = false;  ///< a token's weights are divided by their sum
  bool sigmoid = false;
  std::size_t groups = 1;
  std::size_t kept_groups = 1;
  double factor = 1.0;     ///< weights are multiplied by it, after the division
  double least_sum = 0.0;  ///< lower bound of the divisor of a softmax's weights
  [[nodiscard]] std::size_t choices() const { return rows * per_token; }
  /// Row stride of logits and of their gradients, in elements.
  [[nodiscard]] std::size_t step() const { return (experts + 7) / 8 * 8; }
};

/// Added to the sum of a token's sigmoids before the division by it, as in transformers.
inline constexpr double kLeastScoreSum = 1e-20;

/// Biases of a router; null: none.
template <class T>
struct RouterBiases {
  const T* logits = nullptr;  ///< [experts], added to the logits
  /// [kAddends, experts], see StoredRows::addends. Their sums are the corrections of the scores.
  const T* correction = nullptr;
  const float* moved = nullptr;  ///< [experts], corrections instead of `correction`
};

/// Result of routing a micro-batch, in device memory. Choice k of row n is number n * K + k.
/// Padding rows have zeros, kNoExpert, and no places.
struct Routing {
  float* probabilities = nullptr;  ///< [N, experts], results of the softmax, or sigmoids
  /// [N], logarithms of the softmax's sums, or sums of the sigmoids.
  float* log_sums = nullptr;
  float* weights = nullptr;           ///< [N, K]
  float* weight_gradients = nullptr;  ///< [N, K], written by the backward pass of the experts
  std::int32_t* chosen = nullptr;     ///< [N, K], experts
  std::int32_t* places = nullptr;     ///< [N K], choices by expert, then by row; -1 after the last

  static Routing take(Bump& bump, const RouterShape& shape) {
    Routing routing;
    routing.probabilities = bump.take<float>(shape.rows * shape.experts);
    routing.log_sums = bump.take<float>(shape.rows);
    routing.weights = bump.take<float>(shape.choices());
    routing.weight_gradients = bump.take<float>(shape.choices());
    routing.chosen = bump.take<std::int32_t>(shape.choices());
    routing.places = bump.take<std::int32_t>(shape.choices());
    return routing;
  }
};

/// Sums for the router losses, over the rows of a micro-batch (without padding) and all routers of
/// the model. With RouterLossSpan::step the choices are those of all micro-batches and ranks before
/// the backward pass: both losses are linear in the other sums, so the terms of micro-batches add
/// up to the losses of the step, and so do their gradients. Sigmoids are divided by the sum of
/// their row, and add nothing to the squares. The number of rows of all routers is the choices of
/// all experts / K.
struct RouterTotals {
  double* probabilities = nullptr;  ///< [experts]
  double* choices = nullptr;        ///< [experts]
  double* squares = nullptr;        ///< [1], squares of the log-sums

  static std::size_t values(std::size_t experts) { return 2 * experts + 1; }
  static RouterTotals at(double* values, std::size_t experts) {
    return {values, values + experts, values + 2 * experts};
  }
};

/// Factors in the derivatives of the router losses, still to be divided by the rows of all routers.
///
/// Let f[e] be the choices of expert e and P[e] the sum of its probabilities, both divided by the
/// rows of all routers without padding. The load-balancing loss is experts * sum of f[e] P[e]
/// (Fedus et al., "Switch Transformers", 2021, equations 4 to 6; over all layers together, as in
/// transformers). The z-loss is the mean of the squared log-sums (Zoph et al., "ST-MoE", 2022,
/// equation 5). Sigmoid routers have no gradients of them.
struct RouterLossScales {
  double balance = 0.0;  ///< coefficient * experts
  double z = 0.0;        ///< 2 * coefficient
};

/// Some choices of one expert.
struct ExpertRows {
  const std::int32_t* places = nullptr;  ///< part of Routing::places; null: 0, 1, 2, ...
  std::size_t count = 0;
  std::size_t per_token = 0;
};

/// A range of choices of one expert, by number among the choices of all.
struct ExpertChoices {
  std::size_t first = 0;
  std::size_t count = 0;
};

/// Choices of all ranks for the experts of a block that has one expert per rank.
struct SharedChoices {
  std::vector<ExpertChoices> sent;  ///< this rank's choices, by expert
  /// Number of choices for this rank's expert, by the rank that made them.
  std::vector<std::size_t> received;
  std::size_t most = 0;  ///< most choices of a rank for an expert; equal on all ranks
};

/// Positions of each expert's rows among the choices of a micro-batch, in host memory: the values
/// that the routers of all ranks have written to Port::routing, rank after rank. Each rank has
/// experts + 1 numbers, perhaps with padding.
class RoutingCounts {
 public:
  RoutingCounts(std::span<const std::int32_t> all, std::uint32_t ranks)
      : all_(all), ranks_(ranks) {}

  /// Returns the choices of rank `rank` for expert `expert` of a layer.
  [[nodiscard]] ExpertChoices choices(std::uint32_t rank, std::uint64_t expert) const {
    const auto starts = all_.subspan(all_.size() / ranks_ * rank);
    const auto first = static_cast<std::size_t>(starts[expert]);
    return {first, static_cast<std::size_t>(starts[expert + 1]) - first};
  }
  /// Returns the number of choices of all ranks for an expert.
  [[nodiscard]] std::size_t of_all(std::uint64_t expert) const {
    std::size_t count = 0;
    for (std::uint32_t rank = 0; rank < ranks_; ++rank) count += choices(rank, expert).count;
    return count;
  }
  /// Returns the expert of `block` that the rank has.
  static std::uint64_t expert_in(const BlockSpec& block, std::uint32_t rank) {
    return block.expert + (block.pieces > 1 ? rank : 0);
  }
  /// Returns the rank's choices for its own expert of `block`.
  [[nodiscard]] ExpertChoices own(const BlockSpec& block, std::uint32_t rank) const {
    return choices(rank, expert_in(block, rank));
  }
  /// Returns all choices for a block with one expert per rank, as rank `own` sees them.
  [[nodiscard]] SharedChoices shared(const BlockSpec& block, std::uint32_t own) const {
    SharedChoices shared;
    for (std::uint32_t rank = 0; rank < block.pieces; ++rank) {
      const std::uint64_t expert = block.expert + rank;
      shared.sent.push_back(choices(own, expert));
      shared.received.push_back(choices(rank, expert_in(block, own)).count);
      for (std::uint32_t other = 0; other < block.pieces; ++other) {
        shared.most = std::max(shared.most, choices(other, expert).count);
      }
    }
    return shared;
  }

 private:
  std::span<const std::int32_t> all_;
  std::uint32_t ranks_;
};

/// Returns the choices of each expert in all of `routings`, whole numbers.
inline std::vector<double> choices_of_all(
    const std::vector<std::span<const std::int32_t>>& routings, std::uint32_t ranks,
    std::size_t experts) {
  std::vector<double> choices(experts);
  for (const auto& routing : routings) {
    const RoutingCounts counts(routing, ranks);
    for (std::size_t e = 0; e < experts; ++e) choices[e] += static_cast<double>(counts.of_all(e));
  }
  return choices;
}

}  // namespace ballast::model
