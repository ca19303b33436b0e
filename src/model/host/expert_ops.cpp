#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "ballast/core/clocks.h"
#include "ballast/core/dtype.h"
#include "ballast/model/kernels.h"

#include "src/model/compute/formulas.h"
#include "src/model/host/kernel_tables.h"
#include "src/model/host/ops.h"
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
  return shape.sigmoid ? sum + kLeastScoreSum : std::max(sum, shape.least_sum);
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

/// Writes the sigmoids of a row. Returns their sum.
double sigmoids(const float* logits, std::size_t experts, float* scores) {
  double total = 0.0;
  for (std::size_t e = 0; e < experts; ++e) {
    scores[e] = static_cast<float>(formulas::sigmoid(static_cast<double>(logits[e])));
    total += static_cast<double>(scores[e]);
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

/// Computes scores, choice and weights of one row. `logits`: the row's [experts]; null for a
/// padding row, which chooses nothing. With sigmoid or a correction, corrected scores overwrite the
/// logits. `correction`: [experts], or null.
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
  to.log_sums[row] = static_cast<float>(shape.sigmoid ? sigmoids(logits, experts, probabilities)
                                                      : softmax(logits, experts, probabilities));
  if (shape.sigmoid || correction != nullptr) {
    for (std::size_t e = 0; e < experts; ++e) {
      logits[e] = probabilities[e] + (correction == nullptr ? 0.0F : correction[e]);
    }
  }
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

/// Writes the places of the rows' choices, sorted by expert, then by row. `starts`: see
/// RouterOps::route().
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

/// Gradients of the logits, in double.
class RouterGradient {
 public:
  RouterGradient(const RouterShape& shape, const Routing& routing, const RouterTotals& totals,
                 const RouterLossScales& scales);
  /// Writes the gradients [experts] of one row.
  void differentiate(std::size_t row, double* gradients) const;

 private:
  /// Adds the gradients of the chosen experts' probabilities.
  void add_choices(std::size_t row, double* gradients) const;

  const RouterShape& shape_;
  const Routing& routing_;
  const double* choices_ = nullptr;  ///< null: without router losses
  double rows_ = 0.0;
  double balance_ = 0.0;
  double z_ = 0.0;
};

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
  const double divisor = divisor_of(shape_, chosen);
  const bool is_constant = !shape_.sigmoid && chosen < shape_.least_sum;
  if (!shape_.renormalises || is_constant) along = 0.0;
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

template <class T>
class HostRouters final : public RouterOps<T> {
 public:
  explicit HostRouters(const RowKernels<T>& kernels) : kernels_(kernels) {}

  void route(const RouterShape& shape, float* logits, const RouterBiases<T>& biases,
             const std::int32_t* targets, const Routing& to, std::int32_t* starts) override {
    std::vector<float> correction;
    if (biases.moved != nullptr) {
      correction.assign(biases.moved, biases.moved + shape.experts);
    } else if (biases.correction != nullptr) {
      correction.resize(shape.experts);
      for (std::size_t e = 0; e < shape.experts; ++e) {
        for (std::size_t a = 0; a < kAddends; ++a) {
          correction[e] += to_float(biases.correction[a * shape.experts + e]);
        }
      }
    }
    split(KernelGroup::experts, shape.rows, 1, [&](Range r) {
      for (std::size_t row = r.begin; row < r.end; ++row) {
        const bool padding = targets != nullptr && targets[row] == kPaddingTarget;
        float* const own = padding ? nullptr : logits + row * shape.step();
        if (biases.logits != nullptr && !padding) {
          kernels_.accumulate(own, biases.logits, shape.experts);
        }
        route_row(shape, own, correction.empty() ? nullptr : correction.data(), row, to);
      }
    });
    place_choices(shape, to, starts);
  }
  void router_gradient(const RouterShape& shape, const Routing& routing, const RouterTotals& totals,
                       const RouterLossScales& scales, T* gradients) override {
    const RouterGradient gradient(shape, routing, totals, scales);
    split(KernelGroup::experts, shape.rows, 1, [&](Range r) {
      std::vector<double> row_gradients(shape.experts);
      for (std::size_t row = r.begin; row < r.end; ++row) {
        gradient.differentiate(row, row_gradients.data());
        T* const to = gradients + row * shape.step();
        for (std::size_t e = 0; e < shape.experts; ++e)
          to[e] = from_float<T>(static_cast<float>(row_gradients[e]));
      }
    });
  }
  [[nodiscard]] std::span<const std::int32_t> fetch(const std::int32_t* values,
                                                    std::size_t count) override {
    return {values, count};
  }
  void add_router_totals(const RouterShape& shape, const Routing& routing, bool first,
                         const RouterTotals& totals) override {
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
  void put_choices(std::span<const double> choices, const RouterTotals& totals) override {
    std::ranges::copy(choices, totals.choices);
  }
  void router_losses(const RouterShape& shape, const RouterTotals& totals,
                     double* losses) override {
    const double rows = std::max(rows_of(shape, totals), 1.0);
    double balance = 0.0;
    for (std::size_t e = 0; e < shape.experts; ++e) {
      balance += totals.choices[e] / rows * (totals.probabilities[e] / rows);
    }
    losses[0] = balance * static_cast<double>(shape.experts);
    losses[1] = *totals.squares / rows;
  }

 private:
  const RowKernels<T>& kernels_;
};

std::size_t place_of(const ExpertRows& rows, std::size_t i) {
  return rows.places == nullptr ? i : static_cast<std::size_t>(rows.places[i]);
}

/// product / weight, or 0 for a weight of 0.
float quotient(float product, float weight) {
  return weight == 0.0F ? 0.0F : product / weight;
}

template <class T>
class HostExperts final : public ExpertOps<T> {
 public:
  explicit HostExperts(const RowKernels<T>& kernels) : kernels_(kernels) {}

  void gather_rows(const ExpertRows& rows, const T* x, const float* weights, T* y,
                   std::size_t padded, std::size_t width) override {
    split(KernelGroup::experts, padded, 1, [&](Range r) {
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
  void dot_rows(const ExpertRows& rows, const T* activated, const T* gradients,
                const float* weights, float* weight_gradients, std::size_t width) override {
    dot(rows, activated, width, gradients, weights, width,
        [&](std::size_t place, float product) { weight_gradients[place] = product; });
  }
  void dot_bias(const ExpertRows& rows, const T* bias, const T* gradients, const float* weights,
                float* weight_gradients, std::size_t width) override {
    dot(rows, bias, 0, gradients, weights, width,
        [&](std::size_t place, float product) { weight_gradients[place] += product; });
  }
  void put_quotients(const ExpertRows& rows, const float* values, const float* weights,
                     float* to) override {
    for (std::size_t i = 0; i < rows.count; ++i) {
      const std::size_t place = place_of(rows, i);
      to[place] = quotient(values[i], weights[place]);
    }
  }
  void add_rows(const ExpertRows& rows, const float* y, const float* weights, float* sums,
                std::size_t width) override {
    split(KernelGroup::experts, rows.count, 1, [&](Range r) {
      for (std::size_t i = r.begin; i < r.end; ++i) {
        const std::size_t place = place_of(rows, i);
        const float weight = weights == nullptr ? 1.0F : weights[place];
        float* const to = sums + place / rows.per_token * width;
        sum_kernels_.accumulate_scaled(to, y + i * width, weight, width);
      }
    });
  }

 private:
  /// Calls take(place, quotient) for each choice. The quotient is the product of a row of
  /// `gradients` and one of `with` (rows are `step` apart), divided by the weight, or 0 for a
  /// weight of 0; see dot_rows().
  template <class Take>
  void dot(const ExpertRows& rows, const T* with, std::size_t step, const T* gradients,
           const float* weights, std::size_t width, Take take) {
    split(KernelGroup::experts, rows.count, 1, [&](Range r) {
      for (std::size_t i = r.begin; i < r.end; ++i) {
        const std::size_t place = place_of(rows, i);
        float product = 0.0F;
        kernels_.row_dot(gradients + i * width, width, with + i * step, width, &product, 1, width);
        take(place, weights == nullptr ? product : quotient(product, weights[place]));
      }
    });
  }
  const RowKernels<T>& kernels_;
  const RowKernels<float>& sum_kernels_ = best_kernels<float>().rows;
};

}  // namespace

template <class T>
void add_expert_ops(const State<T>& state, DeviceOps<T>& to) {
  to.routers = std::make_shared<HostRouters<T>>(state->kernels.rows);
  to.experts = std::make_shared<HostExperts<T>>(state->kernels.rows);
}

template void add_expert_ops(const State<float>&, DeviceOps<float>&);
template void add_expert_ops(const State<Bf16>&, DeviceOps<Bf16>&);
template void add_expert_ops(const State<F16>&, DeviceOps<F16>&);

}  // namespace ballast::model::host
