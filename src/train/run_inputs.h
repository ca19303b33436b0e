#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "ballast/comm/agreement.h"
#include "ballast/comm/communicator.h"
#include "ballast/config/config.h"
#include "ballast/text/output_file.h"
#include "ballast/train/run_events.h"
#include "ballast/train/run_options.h"

#include "src/checkpoint/checkpoint.h"
#include "src/data/training_data.h"
#include "src/train/run_files.h"

namespace ballast::train {

/// Lists what a rank reads before the first step and must be the same on all ranks, for
/// comm::require_agreement(): the program, the variables of the environment that change arithmetic,
/// the files of the model, its adapters and the data by their content, the config without its
/// paths, and the options. resume_run() compares the files of a checkpoint.
///
/// Files of up to 4 MiB are hashed whole, larger ones as long as they have at most 256 MiB
/// together. Of others, 64 evenly spread pieces of 64 KiB are hashed, the header of a safetensors
/// file, and 4 KiB from the middle of up to 512 of its tensors. So a folder of 100 GB takes a
/// second or two from a local drive. Weights that ranks keep whole are compared exactly after they
/// are read (engine::Engine::start()). Throws Error(data), Error(io).
std::vector<comm::Identity> compared_inputs(const config::Config& config,
                                            const data::TrainingData& data,
                                            const RunOptions& options);

/// Lists the files of a checkpoint in the same way.
std::vector<comm::Identity> compared_files(const checkpoint::Checkpoint& checkpoint);

/// Warns on rank 0 if another rank computes in another way (Engine::arithmetic()). Collective.
void warn_of_other_arithmetic(const std::string& arithmetic, comm::Ranks* ranks);

/// Everything that a run opens before it is planned.
struct OpenedRun {
  data::TrainingData data;
  std::unique_ptr<RunFiles> files = {};  ///< only on rank 0
  text::OutputRule trace = {};           ///< only on rank 0
};

/// Opens the run's inputs. Throws like check_inputs().
OpenedRun open_inputs(const config::Config& config, const comm::Launch& launch);

/// Takes the run directory, and checks the place of the trace. Neither may replace an input of the
/// run: throws Error(usage); also throws like RunFiles and text::check_output().
void open_outputs(const config::Config& config, const RunOptions& options, OpenedRun& inputs);

/// Opens inputs and outputs for train(), on all `ranks` (nullptr: a single process). Before rank 0
/// writes anything, the ranks compare their inputs. Replaces an automatic `options.directory` by
/// what it is. Returns false if the run has finished before. Collective; throws a comm::JointError
/// for the errors of open_inputs(), open_outputs() and comm::require_agreement().
bool open_run(const config::Config& config, Observer& observer, comm::Ranks* ranks,
              RunOptions& options, OpenedRun& inputs);

/// Finds settings and data that work but are probably not intended. Returns one line for each, with
/// the key to change. Reads no weights, and at most the config.json next to them.
std::vector<std::string> find_doubts(const config::Config& config, const data::TrainingData& data);

/// Logs find_doubts() as warnings.
void warn_of_doubts(const config::Config& config, const data::TrainingData& data);

// Inputs that are named on the command line instead of in the config.

/// Returns overrides of a config (config::load()) that make `files` the only training data:
/// documents, pairs, tokens or text. Their content decides, or if it does not, their names
/// (.safetensors, .bin, .npy). None for no files. Throws Error(usage) for files of several kinds.
std::vector<std::string> data_overrides(const std::vector<std::string>& files);

/// Like data_overrides(), and makes them the evaluation data, all of them.
std::vector<std::string> evaluation_data_overrides(const std::vector<std::string>& files);

/// Returns kFolderLength, or the longest sequence in the config.json of the Hugging Face folder
/// `folder` if that is shorter. Throws Error(config).
std::uint64_t usual_length(const std::filesystem::path& folder);

}  // namespace ballast::train
