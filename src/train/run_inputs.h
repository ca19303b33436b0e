#pragma once

#include <memory>

#include "ballast/comm/launch.h"
#include "ballast/config/config.h"
#include "ballast/text/output_file.h"
#include "ballast/train/run_options.h"

#include "src/data/training_data.h"
#include "src/train/run_files.h"

namespace ballast::train {

/// Everything that a run needs before it is planned.
struct RunInputs {
  data::TrainingData data;
  std::unique_ptr<RunFiles> files = {};  ///< on rank 0
  text::OutputRule trace = {};           ///< on rank 0
};

/// Opens what the run reads. Throws like check_inputs().
RunInputs open_inputs(const config::Config& config, const comm::Launch& launch);

/// Takes the run directory, and checks the place of the trace. Neither may replace what the run
/// reads: throws Error(usage); also like RunFiles and text::check_output().
void open_outputs(const config::Config& config, const RunOptions& options, RunInputs& inputs);

}  // namespace ballast::train
