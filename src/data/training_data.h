#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "ballast/config/config.h"
#include "ballast/config/key_effects.h"
#include "ballast/data/sequences.h"
#include "ballast/data/tokens.h"

namespace ballast::data {

/// A stream of tokens whose ids are not all checked yet.
struct UncheckedTokens {
  std::string key;  ///< key in the data section, for messages
  std::shared_ptr<const TokenSource> source;
};

/// Searches for ids outside the vocabulary: in all of a stream of up to 16 Mi tokens; otherwise in
/// 4 Mi tokens that are spread evenly, and at the start and end of each file. Returns whether
/// everything was checked. Logs a warning for a long stream of a single id. Throws like
/// TokenSource::read().
bool check_sample(const TokenSource& source);

/// Checks the rest of the data during a run, on a thread of the lowest priority that reads a tenth
/// of the time. With several ranks, each checks a part.
class IdCheck {
 public:
  /// Starts the thread if there is anything to check. `rank` is below `world`.
  IdCheck(std::vector<UncheckedTokens> unchecked, std::uint64_t rank, std::uint64_t world);
  /// Stops the thread.
  ~IdCheck();
  IdCheck(const IdCheck&) = delete;
  IdCheck& operator=(const IdCheck&) = delete;

  /// Throws the error found so far, if any: Error(data) with the key, file, token and id.
  void rethrow();
  /// Waits until everything is checked.
  void wait();

 private:
  void run();
  /// Checks a source piece by piece. Returns false if it was stopped.
  bool check(const TokenSource& source);
  /// Pauses the thread for `seconds`. Returns false if it was stopped.
  bool pause(double seconds);

  std::vector<UncheckedTokens> unchecked_;
  std::uint64_t rank_;
  std::uint64_t world_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stopping_ = false;
  bool waiting_ = false;  ///< true: check without pauses
  std::exception_ptr found_;
  std::thread thread_;
};

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

/// Identifies the data in `files`, independent of their paths: "2 files, 17.6 KiB, 18022 tokens,
/// XXH3 0123456789abcdef". The hash covers the sizes and, up to 16 MiB, all bytes; of larger data,
/// 256 pieces of 64 KiB that are evenly spread from the first byte to the last. Throws Error(io),
/// Error(data).
std::string describe_content(const std::vector<std::filesystem::path>& files, std::uint64_t tokens);

/// Returns the settings that determine the results of a run: config::settings_of(), and the content
/// of the training data under the key of its files. Throws like describe_content().
config::Settings settings_of_run(const config::Config& config,
                                 const std::vector<std::filesystem::path>& files,
                                 std::uint64_t tokens);

}  // namespace ballast::data
