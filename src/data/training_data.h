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
  std::vector<UncheckedTokens> unchecked = {};  ///< long streams of which only samples were checked
  std::vector<std::filesystem::path> files = {};  ///< files of the training data, in order
  std::uint64_t tokens = 0;                       ///< tokens in these files
  std::vector<std::filesystem::path> evaluation_files = {};  ///< files of data.eval
  std::uint64_t longest_document = 0;  ///< training documents only; 0 if there are none
  /// A data.sequence_length with much less padding, and its share of padding; 0 if there is none or
  /// padding is rare.
  std::uint64_t better_length = 0;
  double better_padding = 0.0;
};

/// Opens the training data, and the evaluation data: the files of data.eval or the share
/// data.held_out. Checks all ids, or samples of a long stream (check_sample()). Unless data.as_is,
/// also checks that documents were made with the tokenizer of the model's folder, and that text is
/// not read byte by byte for a model with a tokenizer. Throws like TokenSource::open(),
/// split_tokens() and DocumentFiles::open(), with the key.
TrainingData open_training_data(const config::Config& config);

/// Opens only the evaluation data: all of data.eval, or the share data.held_out of the training
/// data. May have no sequences. Throws like open_training_data().
std::shared_ptr<const SequenceSource> open_evaluation_data(const config::Config& config);

/// Logs a warning if evaluations are requested but the data are too short for one micro-batch, that
/// is, if there are no `batches`.
void warn_without_evaluation(const config::Config& config, const TrainingData& data,
                             std::uint64_t batches);

}  // namespace ballast::data
