#pragma once

#include <memory>

#include "ballast/comm/communicator.h"
#include "ballast/config/config.h"
#include "ballast/text/output_file.h"
#include "ballast/train/run_events.h"
#include "ballast/train/run_options.h"

#include "src/data/training_data.h"
#include "src/train/run_files.h"

namespace ballast::train {

/// Everything that a run opens before it is planned.
struct RunInputs {
  data::TrainingData data;
  std::unique_ptr<RunFiles> files = {};  ///< only on rank 0
  text::OutputRule trace = {};           ///< only on rank 0
};

/// Opens the run's inputs. Throws like check_inputs().
RunInputs open_inputs(const config::Config& config, const comm::Launch& launch);

/// Takes the run directory, and checks the place of the trace. Neither may replace an input of the
/// run: throws Error(usage); also throws like RunFiles and text::check_output().
void open_outputs(const config::Config& config, const RunOptions& options, RunInputs& inputs);

/// Opens inputs and outputs for train(), on all `ranks` (nullptr: a single process). Before rank 0
/// writes anything, the ranks compare their inputs. Replaces an automatic `options.directory` by
/// what it is. Returns false if the run has finished before. Collective; throws a comm::JointError
/// for the errors of open_inputs(), open_outputs() and comm::require_agreement().
bool open_run(const config::Config& config, Observer& observer, comm::Ranks* ranks,
              RunOptions& options, RunInputs& inputs);

}  // namespace ballast::train
