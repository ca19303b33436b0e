#pragma once

#include <memory>

#include "ballast/comm/launch.h"
#include "ballast/config/config.h"
#include "ballast/text/output_file.h"
#include "ballast/train/trainer.h"

#include "src/train/run_files.h"
#include "src/train/training_data.h"

namespace ballast::train {

/// What a run has opened and checked before it is planned.
struct Inputs {
  TrainingData data;
  std::unique_ptr<RunFiles> files = {};  ///< on rank 0
  text::OutputRule trace = {};           ///< on rank 0
};

/// Opens the data and checks the initial weights and the swap paths. Throws Error(usage, config, io)
/// with the key or the file.
Inputs open_inputs(const config::Config& config, const comm::Launch& launch);

/// On rank 0: takes the run directory into `inputs.files` and checks the place of the trace. Throws
/// Error(usage) if one of them would replace what the run reads, and like RunFiles.
void open_outputs(const config::Config& config, const RunOptions& options, Inputs& inputs);

}  // namespace ballast::train
