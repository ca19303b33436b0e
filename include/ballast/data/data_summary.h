#pragma once

#include <cstdint>

namespace ballast::data {

/// Data that a run trains on.
struct DataSummary {
  std::uint64_t files = 0;
  std::uint64_t training_tokens = 0;
  std::uint64_t evaluation_tokens = 0;
  std::uint64_t documents = 0;  ///< to train on; 0 if the data have none
  std::uint64_t sequences = 0;  ///< into which they are packed
  double padding = 0.0;         ///< share of the tokens of these sequences
};

}  // namespace ballast::data
