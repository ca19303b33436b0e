#include "src/model/host/layer_ops.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <numeric>
#include <utility>
#include <vector>

#include "ballast/core/dtype.h"
#include "ballast/core/memory.h"
#include "ballast/model/packed_values.h"

#include "src/model/compute/formulas.h"
#include "src/model/host/team.h"

namespace ballast::model::host {

namespace {

/// Number of rows of all routers.
double rows_of(const RouterShape& shape, const RouterTotals& totals) {
  return std::accumulate(totals.choices, totals.choices + shape.experts, 0.0) /
         static_cast<double>(shape.per_token);
}

/// The divisor of a token's weights. `sum`: that of the chosen probabilities.
double divisor_of(const RouterShape& shape, double sum) {
  if (!shape.renormalises) return 1.0;
  return shape.sigmoid ? sum + kLeastScoreSum : sum;
}

/// Writes the probabilities of a row. Returns the logarithm of the softmax's sum.
double softmax(const float* logits, std::size_t experts, float* probabilities) {
  const double largest = *std::max_element(logits, logits + experts);
  double total = 0.0;
  for (std::size_t e = 0; e < experts; ++e)
    total += std::exp(static_cast<double>(logits[e]) - largest);
  for (std::size_t e = 0; e < experts; ++e) {
    probabilities[e] =
        static_cast<float>(std::exp(static_cast<double>(logits[e]) - largest) / total);
  }
  return largest + std::log(total);
}

/// Writes the sigmoids of a row, and replaces the logits by corrected scores. Returns the sum of
/// the sigmoids.
double sigmoids(float* logits, const float* correction, std::size_t experts, float* scores) {
  double total = 0.0;
  for (std::size_t e = 0; e < experts; ++e) {
    scores[e] = static_cast<float>(formulas::sigmoid(static_cast<double>(logits[e])));
    total += static_cast<double>(scores[e]);
    logits[e] = scores[e] + (correction == nullptr ? 0.0F : correction[e]);
  }
  return total;
}

/// Returns the sum of the two largest scores.
float two_best(const float* scores, std::size_t count) {
  float best = -HUGE_VALF;
  float second = -HUGE_VALF;
  for (std::size_t i = 0; i < count; ++i) {
    if (scores[i] > best) {
      second = std::exchange(best, scores[i]);
    } else if (scores[i] > second) {
      second = scores[i];
    }
  }
  return best + second;
}

/// Gives the experts of all groups but the best the lowest score.
void drop_groups(const RouterShape& shape, float* scores) {
  const std::size_t size = shape.experts / shape.groups;
  std::vector<float> of_group(shape.groups);
  for (std::size_t g = 0; g < shape.groups; ++g) of_group[g] = two_best(scores + g * size, size);
  for (std::size_t g = 0; g < shape.groups; ++g) {
    std::size_t better = 0;
    for (std::size_t other = 0; other < shape.groups; ++other) {
      better += of_group[other] > of_group[g] || (of_group[other] == of_group[g] && other < g);
    }
    if (better >= shape.kept_groups) std::fill_n(scores + g * size, size, -HUGE_VALF);
  }
}

}  // namespace

void route_row(const RouterShape& shape, float* logits, const float* correction, std::size_t row,
               const Routing& to) {
  if (logits == nullptr) {
    std::fill_n(to.probabilities + row * shape.experts, shape.experts, 0.0F);
    to.log_sums[row] = 0.0F;
    std::fill_n(to.weights + row * shape.per_token, shape.per_token, 0.0F);
    std::fill_n(to.chosen + row * shape.per_token, shape.per_token, kNoExpert);
    return;
  }
  const std::size_t experts = shape.experts;
  float* const probabilities = to.probabilities + row * experts;
  to.log_sums[row] =
      static_cast<float>(shape.sigmoid ? sigmoids(logits, correction, experts, probabilities)
                                       : softmax(logits, experts, probabilities));
  if (shape.groups > 1) drop_groups(shape, logits);
  std::int32_t* const chosen = to.chosen + row * shape.per_token;
  float* const weights = to.weights + row * shape.per_token;
  double sum = 0.0;
  for (std::size_t k = 0; k < shape.per_token; ++k) {
    std::size_t best = experts;
    for (std::size_t e = 0; e < experts; ++e) {
      const bool taken = std::find(chosen, chosen + k, static_cast<std::int32_t>(e)) != chosen + k;
      // NaN is never larger, so the first remaining expert is taken.
      if (!taken && (best == experts || logits[e] > logits[best])) best = e;
    }
    chosen[k] = static_cast<std::int32_t>(best);
    weights[k] = probabilities[best];
    sum += static_cast<double>(weights[k]);
  }
  const double divisor = divisor_of(shape, sum);
  for (std::size_t k = 0; k < shape.per_token; ++k) {
    weights[k] = static_cast<float>(static_cast<double>(weights[k]) / divisor * shape.factor);
  }
}

void place_choices(const RouterShape& shape, const Routing& to, std::int32_t* starts) {
  // Counting sort.
  std::vector<std::int32_t> next(shape.experts + 1, 0);
  for (std::size_t i = 0; i < shape.choices(); ++i) {
    if (to.chosen[i] != kNoExpert) ++next[static_cast<std::size_t>(to.chosen[i]) + 1];
  }
  std::partial_sum(next.begin(), next.end(), next.begin());
  if (starts != nullptr) std::copy(next.begin(), next.end(), starts);
  std::fill(to.places + next.back(), to.places + shape.choices(), -1);
  for (std::size_t i = 0; i < shape.choices(); ++i) {
    if (to.chosen[i] == kNoExpert) continue;
    to.places[next[static_cast<std::size_t>(to.chosen[i])]++] = static_cast<std::int32_t>(i);
  }
}

void add_router_totals(const RouterShape& shape, const Routing& routing, bool first,
                       const RouterTotals& totals) {
  if (first) std::fill_n(totals.probabilities, RouterTotals::values(shape.experts), 0.0);
  split(shape.experts, 8, [&](Range r) {
    for (std::size_t row = 0; row < shape.rows; ++row) {
      const float* const from = routing.probabilities + row * shape.experts;
      const double divisor = shape.sigmoid ? static_cast<double>(routing.log_sums[row]) : 1.0;
      if (divisor == 0.0) continue;  // padding
      for (std::size_t e = r.begin; e < r.end; ++e) {
        totals.probabilities[e] += static_cast<double>(from[e]) / divisor;
      }
    }
  });
  for (std::size_t i = 0; i < shape.choices(); ++i) {
    if (routing.chosen[i] != kNoExpert) totals.choices[routing.chosen[i]] += 1.0;
  }
  for (std::size_t row = 0; row < shape.rows && !shape.sigmoid; ++row) {
    const auto sum = static_cast<double>(routing.log_sums[row]);
    *totals.squares += sum * sum;
  }
}
void router_losses(const RouterShape& shape, const RouterTotals& totals, double* losses) {
  const double rows = std::max(rows_of(shape, totals), 1.0);
  double balance = 0.0;
  for (std::size_t e = 0; e < shape.experts; ++e) {
    balance += totals.choices[e] / rows * (totals.probabilities[e] / rows);
  }
  losses[0] = balance * static_cast<double>(shape.experts);
  losses[1] = *totals.squares / rows;
}

RouterGradient::RouterGradient(const RouterShape& shape, const Routing& routing,
                               const RouterTotals& totals, const RouterLossScales& scales)
    : shape_(shape), routing_(routing) {
  if (totals.choices == nullptr || shape.sigmoid) return;
  rows_ = rows_of(shape, totals);
  if (rows_ == 0.0) return;
  choices_ = totals.choices;
  balance_ = static_cast<double>(static_cast<float>(scales.balance / rows_));
  z_ = static_cast<double>(static_cast<float>(scales.z / rows_));
}

void RouterGradient::add_choices(std::size_t row, double* gradients) const {
  const float* const probabilities = routing_.probabilities + row * shape_.experts;
  const std::size_t at = row * shape_.per_token;
  double chosen = 0.0;
  double along = 0.0;
  for (std::size_t k = 0; k < shape_.per_token; ++k) {
    chosen += static_cast<double>(probabilities[routing_.chosen[at + k]]);
    along += static_cast<double>(routing_.weight_gradients[at + k]) *
             static_cast<double>(routing_.weights[at + k]);
  }
  if (!shape_.renormalises) along = 0.0;
  const double divisor = divisor_of(shape_, chosen);
  for (std::size_t k = 0; k < shape_.per_token; ++k) {
    const double gradient = static_cast<double>(routing_.weight_gradients[at + k]) * shape_.factor;
    gradients[routing_.chosen[at + k]] += (gradient - along) / divisor;
  }
}

void RouterGradient::differentiate(std::size_t row, double* gradients) const {
  const float* const probabilities = routing_.probabilities + row * shape_.experts;
  const std::size_t at = row * shape_.per_token;
  if (routing_.chosen[at] == kNoExpert) {
    std::fill_n(gradients, shape_.experts, 0.0);
    return;
  }
  // Gradients of the probabilities.
  for (std::size_t e = 0; e < shape_.experts; ++e) {
    gradients[e] = choices_ == nullptr ? 0.0 : balance_ * choices_[e] / rows_;
  }
  add_choices(row, gradients);
  // Gradients of the logits.
  if (shape_.sigmoid) {
    for (std::size_t e = 0; e < shape_.experts; ++e) {
      const auto score = static_cast<double>(probabilities[e]);
      gradients[e] *= score * (1.0 - score);
    }
    return;
  }
  double mean = 0.0;
  for (std::size_t e = 0; e < shape_.experts; ++e) {
    mean += gradients[e] * static_cast<double>(probabilities[e]);
  }
  const double z = z_ * static_cast<double>(routing_.log_sums[row]);
  for (std::size_t e = 0; e < shape_.experts; ++e) {
    gradients[e] = static_cast<double>(probabilities[e]) * (gradients[e] - mean + z);
  }
}

}  // namespace ballast::model::host
