#pragma once

#include <cstdint>

namespace ballast::data {

/// Summary of a run's training data.
struct DataSummary {
  std::uint64_t files = 0;
  std::uint64_t training_tokens = 0;
  std::uint64_t evaluation_tokens = 0;
  std::uint64_t documents = 0;  ///< training documents; 0 if the data have none
  std::uint64_t sequences = 0;  ///< sequences that they are packed into
  double padding = 0.0;         ///< share of padding in the tokens of these sequences
};

}  // namespace ballast::data
