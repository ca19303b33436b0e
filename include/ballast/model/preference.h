#pragma once

namespace ballast::model {

/// Direct preference optimization (Rafailov et al., 2023, arXiv 2305.18290, equation 7).
struct Preference {
  double beta = 0.1;             ///< weight of a reward
  double label_smoothing = 0.0;  ///< probability that a pair's labels are swapped
};

/// The head's result for one pair. A reward is beta * (log pi - log ref) of a completion.
struct PairResult {
  double loss = 0.0;  ///< -log sigmoid(chosen - rejected), smoothed
  double chosen = 0.0;
  double rejected = 0.0;
  double correct = 0.0;  ///< 1 if the chosen completion has the larger reward
};

}  // namespace ballast::model
