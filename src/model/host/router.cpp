#include "src/model/host/router.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "src/model/host/team.h"

namespace ballast::model::host {
namespace {

/// Number of rows of all routers.
double rows_of(const RouterShape& shape, const RouterTotals& totals) {
  return std::accumulate(totals.choices, totals.choices + shape.experts, 0.0) /
         static_cast<double>(shape.per_token);
}

}  // namespace

void route_row(const RouterShape& shape, const float* logits, std::size_t row, const Routing& to) {
  if (logits == nullptr) {
    std::fill_n(to.probabilities + row * shape.experts, shape.experts, 0.0F);
    to.log_sums[row] = 0.0F;
    std::fill_n(to.weights + row * shape.per_token, shape.per_token, 0.0F);
    std::fill_n(to.chosen + row * shape.per_token, shape.per_token, kNoExpert);
    return;
  }
  const std::size_t experts = shape.experts;
  float* const probabilities = to.probabilities + row * experts;
  const double largest = *std::max_element(logits, logits + experts);
  double total = 0.0;
  for (std::size_t e = 0; e < experts; ++e)
    total += std::exp(static_cast<double>(logits[e]) - largest);
  for (std::size_t e = 0; e < experts; ++e) {
    probabilities[e] =
        static_cast<float>(std::exp(static_cast<double>(logits[e]) - largest) / total);
  }
  to.log_sums[row] = static_cast<float>(largest + std::log(total));
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
  if (!shape.renormalises) return;
  for (std::size_t k = 0; k < shape.per_token; ++k) {
    weights[k] = static_cast<float>(static_cast<double>(weights[k]) / sum);
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
      for (std::size_t e = r.begin; e < r.end; ++e) {
        totals.probabilities[e] += static_cast<double>(from[e]);
      }
    }
  });
  for (std::size_t i = 0; i < shape.choices(); ++i) {
    if (routing.chosen[i] != kNoExpert) totals.choices[routing.chosen[i]] += 1.0;
  }
  for (std::size_t row = 0; row < shape.rows; ++row) {
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
  if (totals.choices == nullptr) return;
  rows_ = rows_of(shape, totals);
  if (rows_ == 0.0) return;
  choices_ = totals.choices;
  balance_ = static_cast<double>(static_cast<float>(scales.balance / rows_));
  z_ = static_cast<double>(static_cast<float>(scales.z / rows_));
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
  double chosen = 0.0;
  double along = 0.0;
  for (std::size_t k = 0; k < shape_.per_token; ++k) {
    chosen += static_cast<double>(probabilities[routing_.chosen[at + k]]);
    along += static_cast<double>(routing_.weight_gradients[at + k]) *
             static_cast<double>(routing_.weights[at + k]);
  }
  for (std::size_t k = 0; k < shape_.per_token; ++k) {
    const double gradient = static_cast<double>(routing_.weight_gradients[at + k]);
    gradients[routing_.chosen[at + k]] +=
        shape_.renormalises ? (gradient - along) / chosen : gradient;
  }
  // Gradients of the logits.
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
