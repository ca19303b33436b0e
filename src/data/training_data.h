#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <vector>

#include "ballast/config/config.h"
#include "ballast/data/data_summary.h"
#include "ballast/data/sequences.h"

#include "src/data/id_check.h"

namespace ballast::data {

/// The opened data of a run.
struct TrainingData {
  std::shared_ptr<const SequenceSource> training;
  std::shared_ptr<const SequenceSource> evaluation;  ///< may be empty
  DataSummary summary;
  std::vector<UncheckedTokens> unchecked = {};    ///< of long streams, only samples are checked
  std::vector<std::filesystem::path> files = {};  ///< with the training data, in their order
  std::uint64_t tokens = 0;                       ///< in these files
  std::vector<std::filesystem::path> evaluation_files = {};  ///< of data.eval
  std::uint64_t longest_document = 0;  ///< tokens, of those to train on; 0 if the data have none
  /// A data.sequence_length with much less padding, and its share; 0 if there is none or padding is
  /// rare.
  std::uint64_t better_length = 0;
  double better_padding = 0.0;
};

/// Opens the training data, and for evaluation the files of data.eval or the share data.held_out.
/// Checks all ids, or samples of a long stream (check_sample()), and, unless data.as_is, that
/// documents were made with the tokenizer of the model's folder and that text is not read byte by
/// byte for a model with a tokenizer. Throws like TokenSource::open(), split_tokens() and
/// DocumentFiles::open(), naming the key.
TrainingData open_training_data(const config::Config& config);

/// Opens only the data for evaluation: all of data.eval, or the share data.held_out of the training
/// data. May have no sequence. Throws like open_training_data().
std::shared_ptr<const SequenceSource> open_evaluation_data(const config::Config& config);

/// Logs a warning if evaluations are asked for but the data are too short for one micro-batch, that
/// is, if there are no `batches`.
void warn_without_evaluation(const config::Config& config, const TrainingData& data,
                             std::uint64_t batches);

}  // namespace ballast::data
