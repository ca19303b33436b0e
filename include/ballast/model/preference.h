#pragma once

namespace ballast::model {

/// Direct preference optimization (Rafailov et al., 2023, arXiv 2305.18290, equation 7).
struct Preference {
  double beta = 0.1;             ///< how much a reward counts
  double label_smoothing = 0.0;  ///< the probability that a pair is the wrong way round
};

/// What the head reports of a pair. A reward is beta * (log pi - log ref) of a completion.
struct PairResult {
  double loss = 0.0;  ///< -log sigmoid(chosen - rejected), smoothed
  double chosen = 0.0;
  double rejected = 0.0;
  double correct = 0.0;  ///< 1 if the chosen one has the larger reward
};

}  // namespace ballast::model
