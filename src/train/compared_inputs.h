#pragma once

#include <string>
#include <vector>

#include "ballast/comm/agreement.h"
#include "ballast/config/config.h"
#include "ballast/train/run_options.h"

#include "src/checkpoint/checkpoint.h"
#include "src/data/training_data.h"

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

}  // namespace ballast::train
