#include "src/train/run_inputs.h"

#include <filesystem>
#include <optional>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "ballast/checkpoint/checkpoints.h"
#include "ballast/comm/agreement.h"
#include "ballast/comm/collective_try.h"
#include "ballast/core/error.h"
#include "ballast/inputs/engine_inputs.h"
#include "ballast/train/trace.h"

#include "src/data/data_content.h"
#include "src/train/automatic_resume.h"
#include "src/train/compared_inputs.h"
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

bool open_run(const config::Config& config, Observer& observer, comm::Ranks* ranks,
              RunOptions& options, RunInputs& inputs) {
  const bool is_root = ranks == nullptr || ranks->rank() == 0;
  const bool automatic = options.directory == RunDirectory::automatic;
  std::vector<comm::Identity> compared;
  comm::collective_try(ranks, [&] {
    if (!options.resume.empty()) checkpoint::check_names_states(options.resume);
    inputs = open_inputs(config, ranks == nullptr ? comm::Launch{} : ranks->launch());
    if (ranks != nullptr) compared = compared_inputs(config, inputs.data, options);
  });
  comm::require_agreement(ranks, compared);
  std::optional<FinishedRun> finished;  // on rank 0
  comm::collective_try(ranks, [&] {
    if (is_root) open_outputs(config, options, inputs);
    if (!is_root || !automatic) return;
    finished =
        find_finished(config, data::settings_of_run(config, inputs.data.files, inputs.data.tokens));
    if (!finished) options.directory = inputs.files->begin_or_continue(config);
  });
  if (!automatic) return true;
  if (is_root && finished) observer.already_finished(*finished);
  if (comm::decided_by_root(ranks, finished.has_value())) return false;
  const bool continues = options.directory == RunDirectory::continued;
  if (comm::decided_by_root(ranks, continues)) options.directory = RunDirectory::continued;
  return true;
}

}  // namespace ballast::train
