#include "src/train/run_inputs.h"

#include <filesystem>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/inputs/engine_inputs.h"
#include "ballast/train/trace.h"

#include "src/train/initial_weights.h"
#include "src/train/run_doubts.h"
#include "src/train/run_trace.h"

namespace ballast::train {

RunInputs open_inputs(const config::Config& config, const comm::Launch& launch) {
  inputs::check_device(config, launch);
  check_initial_weights(config);
  RunInputs inputs = {.data = data::open_training_data(config)};
  inputs::check_swap_paths(config, launch);
  if (launch.first()) warn_of_doubts(config, inputs.data);
  return inputs;
}

void open_outputs(const config::Config& config, const RunOptions& options, RunInputs& inputs) {
  inputs.files = std::make_unique<RunFiles>(config, options.directory);
  std::vector<std::filesystem::path> read = inputs.data.files;
  read.insert(read.end(), {options.trace.config, config.initial_weights});
  read.insert(read.end(), config.data.eval.begin(), config.data.eval.end());
  for (const std::filesystem::path& file : read) {
    if (options.directory != RunDirectory::overwritten || !inputs.files->owns(file)) continue;
    throw Error(ErrorCategory::usage,
                fmt::format("{} is read by this run, and --overwrite would replace it; choose "
                            "another run directory with --out",
                            file.string()));
  }
  const std::filesystem::path& trace = options.trace.file;
  if (trace.empty()) return;
  inputs.trace = trace_rule(kTracedProcess, options.trace.overwrite, std::move(read));
  if (inputs.files->owns(trace)) {
    throw Error(ErrorCategory::usage,
                fmt::format("{} is a file of the run itself; choose another file for --trace",
                            trace.string()));
  }
  text::check_output(trace, inputs.trace);
}

}  // namespace ballast::train
