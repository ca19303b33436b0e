#pragma once

#include <cstdint>
#include <memory>

#include "ballast/config/config.h"
#include "ballast/train/tokens.h"

namespace ballast::train {

/// The opened training data of a run.
struct TrainingData {
  std::shared_ptr<const TokenSource> source;
  TokenSplit split;
};

/// Throws like TokenSource::open() and split_tokens(), naming the key.
TrainingData open_training_data(const config::Config& config);

/// Logs a warning if data.held_out asks for evaluations but the data are too short for one
/// micro-batch, that is, if there are no `batches`.
void warn_without_evaluation(const config::Config& config, const TrainingData& data,
                             std::uint64_t batches);

}  // namespace ballast::train
