#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "ballast/model/preference.h"

#include "src/model/compute/formulas.h"

namespace ballast::model {

/// The rows of a micro-batch of preference pairs.
struct PairRows {
  const double* losses = nullptr;         ///< [N] cross-entropy of each row
  const std::int32_t* targets = nullptr;  ///< [N]
  std::size_t length = 0;                 ///< tokens per sequence
  std::size_t pairs = 0;
  const double* reference = nullptr;  ///< [2 pairs], loss sums of the reference model by sequence
  float* weights = nullptr;           ///< [N], output: derivatives of the pairs' losses
};

/// Cross-entropy of a completion, summed over its tokens, in nats.
struct CompletionLosses {
  double trained = 0.0;
  double reference = 0.0;
};

struct WeighedPair {
  PairResult result;
  /// Derivative of the loss with respect to the cross-entropy of the chosen completion. The
  /// rejected completion has the negative.
  float weight = 0.0F;
};

namespace formulas {

/// -log sigmoid(x), finite even if sigmoid(x) underflows to 0.
constexpr double negative_log_sigmoid(double x) {
  return log1p(exp(x < 0.0 ? x : -x)) - (x < 0.0 ? x : 0.0);
}

}  // namespace formulas

/// The loss of a pair: with z = beta ((log pi(c) - log ref(c)) - (log pi(r) - log ref(r))) and the
/// label smoothing e, (1 - e) (-log sigmoid(z)) + e (-log sigmoid(-z)). Its derivative with respect
/// to z is sigmoid(z) - (1 - e). Source: Rafailov et al., 2023, arXiv 2305.18290, equations 3 and 7
/// and the conservative form of Mitchell, "A note on DPO with noisy preferences", 2023.
constexpr WeighedPair weigh_pair(const Preference& how, const CompletionLosses& chosen,
                                 const CompletionLosses& rejected) {
  const double first = how.beta * (chosen.reference - chosen.trained);
  const double second = how.beta * (rejected.reference - rejected.trained);
  const double z = first - second;
  const double e = how.label_smoothing;
  const double loss =
      (1.0 - e) * formulas::negative_log_sigmoid(z) + e * formulas::negative_log_sigmoid(-z);
  return {{loss, first, second, first > second ? 1.0 : 0.0},
          static_cast<float>(how.beta * (1.0 - e - formulas::sigmoid(z)))};
}

}  // namespace ballast::model
