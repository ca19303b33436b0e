#include "src/model/host/router_ops.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "src/model/host/team.h"

// The operations of routers and experts.

namespace ballast::model::host {
namespace {

std::size_t place_of(const ExpertRows& rows, std::size_t i) {
  return rows.places == nullptr ? i : static_cast<std::size_t>(rows.places[i]);
}

/// product / weight, or 0 for a weight of 0.
float quotient(float product, float weight) {
  return weight == 0.0F ? 0.0F : product / weight;
}

/// Softmax, choice and weights of one row.
void route_row(const RouterShape& shape, const float* logits, std::size_t row, const Routing& to) {
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

void decide_nothing(const RouterShape& shape, std::size_t row, const Routing& to) {
  std::fill_n(to.probabilities + row * shape.experts, shape.experts, 0.0F);
  to.log_sums[row] = 0.0F;
  std::fill_n(to.weights + row * shape.per_token, shape.per_token, 0.0F);
  std::fill_n(to.chosen + row * shape.per_token, shape.per_token, kNoExpert);
}

/// Number of rows of all routers.
double rows_of(const RouterShape& shape, const RouterTotals& totals) {
  return std::accumulate(totals.choices, totals.choices + shape.experts, 0.0) /
         static_cast<double>(shape.per_token);
}

/// The part of a row's gradients that comes from the router losses.
struct OfLosses {
  const double* choices = nullptr;  ///< null: nothing
  double rows = 0.0;
  double balance = 0.0;
  double z = 0.0;

  OfLosses(const RouterShape& shape, const RouterTotals& totals, const RouterLossScales& scales) {
    if (totals.choices == nullptr) return;
    rows = rows_of(shape, totals);
    if (rows == 0.0) return;
    choices = totals.choices;
    balance = static_cast<double>(static_cast<float>(scales.balance / rows));
    z = static_cast<double>(static_cast<float>(scales.z / rows));
  }
};

/// The gradients of one row's logits, in double.
void differentiate_row(const RouterShape& shape, const Routing& routing, const OfLosses& losses,
                       std::size_t row, double* gradients) {
  const float* const probabilities = routing.probabilities + row * shape.experts;
  const std::size_t at = row * shape.per_token;
  if (routing.chosen[at] == kNoExpert) {
    std::fill_n(gradients, shape.experts, 0.0);
    return;
  }
  // Gradients of the probabilities.
  for (std::size_t e = 0; e < shape.experts; ++e) {
    gradients[e] =
        losses.choices == nullptr ? 0.0 : losses.balance * losses.choices[e] / losses.rows;
  }
  double chosen = 0.0;
  double along = 0.0;
  for (std::size_t k = 0; k < shape.per_token; ++k) {
    chosen += static_cast<double>(probabilities[routing.chosen[at + k]]);
    along += static_cast<double>(routing.weight_gradients[at + k]) *
             static_cast<double>(routing.weights[at + k]);
  }
  for (std::size_t k = 0; k < shape.per_token; ++k) {
    const double gradient = static_cast<double>(routing.weight_gradients[at + k]);
    gradients[routing.chosen[at + k]] +=
        shape.renormalises ? (gradient - along) / chosen : gradient;
  }
  // Gradients of the logits.
  double mean = 0.0;
  for (std::size_t e = 0; e < shape.experts; ++e) {
    mean += gradients[e] * static_cast<double>(probabilities[e]);
  }
  const double z = losses.z * static_cast<double>(routing.log_sums[row]);
  for (std::size_t e = 0; e < shape.experts; ++e) {
    gradients[e] = static_cast<double>(probabilities[e]) * (gradients[e] - mean + z);
  }
}

}  // namespace

template <class T>
void RouterOps<T>::route(const RouterShape& shape, float* logits, const T* bias,
                         const std::int32_t* targets, const Routing& to,
                         std::int32_t* starts) const {
  split(shape.rows, 1, [&](Range r) {
    for (std::size_t row = r.begin; row < r.end; ++row) {
      if (targets != nullptr && targets[row] == kPaddingTarget) {
        decide_nothing(shape, row, to);
        continue;
      }
      float* const own = logits + row * shape.step();
      if (bias != nullptr) kernels_.accumulate(own, bias, shape.experts);
      route_row(shape, own, row, to);
    }
  });
  // Counting sort by expert, then by row.
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

template <class T>
void RouterOps<T>::add_router_totals(const RouterShape& shape, const Routing& routing, bool first,
                                     const RouterTotals& totals) const {
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

template <class T>
void RouterOps<T>::router_losses(const RouterShape& shape, const RouterTotals& totals,
                                 double* losses) const {
  const double rows = std::max(rows_of(shape, totals), 1.0);
  double balance = 0.0;
  for (std::size_t e = 0; e < shape.experts; ++e) {
    balance += totals.choices[e] / rows * (totals.probabilities[e] / rows);
  }
  losses[0] = balance * static_cast<double>(shape.experts);
  losses[1] = *totals.squares / rows;
}

template <class T>
void RouterOps<T>::router_gradient(const RouterShape& shape, const Routing& routing,
                                   const RouterTotals& totals, const RouterLossScales& scales,
                                   T* gradients) const {
  const OfLosses losses(shape, totals, scales);
  split(shape.rows, 1, [&](Range r) {
    std::vector<double> row_gradients(shape.experts);
    for (std::size_t row = r.begin; row < r.end; ++row) {
      differentiate_row(shape, routing, losses, row, row_gradients.data());
      T* const to = gradients + row * shape.step();
      for (std::size_t e = 0; e < shape.experts; ++e)
        to[e] = from_float<T>(static_cast<float>(row_gradients[e]));
    }
  });
}

template <class T>
void RouterOps<T>::gather_rows(const ExpertRows& rows, const T* x, const float* weights, T* y,
                               std::size_t padded, std::size_t width) const {
  split(padded, 1, [&](Range r) {
    for (std::size_t i = r.begin; i < r.end; ++i) {
      T* const to = y + i * width;
      if (i >= rows.count) {
        std::fill_n(to, width, T());
        continue;
      }
      const std::size_t place = place_of(rows, i);
      const T* const from = x + place / rows.per_token * width;
      if (weights == nullptr) {
        std::memcpy(to, from, width * sizeof(T));
      } else {
        kernels_.scale(from, weights[place], to, width);
      }
    }
  });
}

template <class T>
void RouterOps<T>::dot_rows(const ExpertRows& rows, const T* activated, const T* gradients,
                            const float* weights, float* weight_gradients,
                            std::size_t width) const {
  dot(rows, activated, width, gradients, weights, width,
      [&](std::size_t place, float product) { weight_gradients[place] = product; });
}

template <class T>
void RouterOps<T>::dot_bias(const ExpertRows& rows, const T* bias, const T* gradients,
                            const float* weights, float* weight_gradients,
                            std::size_t width) const {
  dot(rows, bias, 0, gradients, weights, width,
      [&](std::size_t place, float product) { weight_gradients[place] += product; });
}

template <class T>
template <class Take>
void RouterOps<T>::dot(const ExpertRows& rows, const T* with, std::size_t step, const T* gradients,
                       const float* weights, std::size_t width, Take take) const {
  split(rows.count, 1, [&](Range r) {
    for (std::size_t i = r.begin; i < r.end; ++i) {
      const std::size_t place = place_of(rows, i);
      float product = 0.0F;
      kernels_.row_dot(gradients + i * width, width, with + i * step, width, &product, 1, width);
      take(place, weights == nullptr ? product : quotient(product, weights[place]));
    }
  });
}

template <class T>
void RouterOps<T>::put_quotients(const ExpertRows& rows, const float* values, const float* weights,
                                 float* to) const {
  for (std::size_t i = 0; i < rows.count; ++i) {
    const std::size_t place = place_of(rows, i);
    to[place] = quotient(values[i], weights[place]);
  }
}

template <class T>
void RouterOps<T>::add_bias(const T* bias, float* y, std::size_t rows, std::size_t width) const {
  if (bias == nullptr) return;
  split(rows, 1, [&](Range r) {
    for (std::size_t i = r.begin; i < r.end; ++i) {
      kernels_.accumulate(y + i * width, bias, width);
    }
  });
}

template <class T>
void RouterOps<T>::add_rows(const ExpertRows& rows, const float* y, const float* weights,
                            float* sums, std::size_t width) const {
  split(rows.count, 1, [&](Range r) {
    for (std::size_t i = r.begin; i < r.end; ++i) {
      const std::size_t place = place_of(rows, i);
      const float weight = weights == nullptr ? 1.0F : weights[place];
      float* const to = sums + place / rows.per_token * width;
      sum_kernels_.accumulate_scaled(to, y + i * width, weight, width);
    }
  });
}

template class RouterOps<float>;
template class RouterOps<Bf16>;
template class RouterOps<F16>;

}  // namespace ballast::model::host
