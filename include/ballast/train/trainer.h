#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "ballast/comm/communicator.h"
#include "ballast/config/config.h"
#include "ballast/core/units.h"
#include "ballast/data/tokens.h"
#include "ballast/train/run_events.h"
#include "ballast/train/run_options.h"

namespace ballast::train {

/// How a run has ended that has not failed.
enum class Ending : std::uint8_t {
  done,    ///< all steps are finished, and so is everything after them
  stopped  ///< earlier, with a checkpoint from which it can continue
};

/// Checks the inputs of `config` on this machine: model.weights, the training data, this rank's
/// swap paths. Throws Error with the key.
void check_inputs(const config::Config& config);

/// Trains `config`: opens its inputs like check_inputs(), takes the run directory
/// (config.ballast.out, which it creates), plans the run (setup::plan_run()), allocates, steps,
/// evaluates, and writes metrics.jsonl, config.json, run.json and, at the end, weights/. A run that
/// fails during its first step leaves none of these files. Throws Error after releasing all memory
/// and swap files; the message includes the latest checkpoint and RunOptions::resuming. Writes the
/// trace after its steps, or on an earlier failure; if this fails, it only warns. A run that writes
/// checkpoints and cannot write the one of its last step only warns if its weights are saved, and
/// otherwise throws Error(io).
///
/// `interrupted` (may be null) ends a run that writes checkpoints after the current step and
/// returns Ending::stopped, unless nothing is left to do then. It ends other runs within a step,
/// and all runs before they are planned, with Error(interrupted), after a summary of the earlier
/// steps.
///
/// `ranks`: the processes of the run; nullptr for a single one. Collective: all ranks run rank 0's
/// config; only rank 0 calls the observer and writes files. Failures before the first step are a
/// comm::JointError on all ranks; later ones are thrown by the rank that failed.
Ending train(const config::Config& config, Observer& observer, const std::atomic<bool>* interrupted,
             const RunOptions& options = {}, comm::Ranks* ranks = nullptr);

/// A model to evaluate and the data for it.
struct EvaluationRequest {
  /// A config, a run directory or a Hugging Face folder.
  std::filesystem::path path;
  /// Files instead of the config's or run's data: documents, pairs, tokens or text. Their content
  /// decides, or if it does not, their names (.safetensors, .bin, .npy). Required for a Hugging
  /// Face folder.
  std::vector<std::string> data;
  std::uint64_t sequence_length = 0;   ///< 0: the config's, or for a folder see kFolderLength
  std::vector<std::string> overrides;  ///< overrides of the config, as in config::load()
};

/// Maximum tokens per sequence for a Hugging Face folder, unless its model allows fewer.
inline constexpr std::uint64_t kFolderLength = 4096;

/// Returns the config that evaluates `request`: data.eval has its files, model.weights those of the
/// run or folder. Throws Error(usage) for missing data or data of several kinds, Error(data) for a
/// run without weights, and like config::load().
config::Config read_evaluation(const EvaluationRequest& request);

struct ModelEvaluation {
  double loss = 0.0;            ///< mean cross-entropy per counted target, in nats
  std::uint64_t targets = 0;    ///< counted targets
  std::uint64_t sequences = 0;  ///< sequences of sequence_length tokens
  double seconds = 0.0;         ///< time for the batches, without reading the weights
  std::string device;
  std::vector<std::string> placement;  ///< see engine::describe_placement()
  std::vector<Bytes> allocated;        ///< by tier
};

/// Called before each part of the work with its name ("reading weights", "evaluating"), the amount
/// done and the total, in bytes or micro-batches.
using ModelEvaluationProgress =
    std::function<void(std::string_view what, std::uint64_t done, std::uint64_t total)>;

/// Evaluates the model of `config` on all of its evaluation data (data.eval or the held-out part),
/// on one device, with memory for weights and activations but not for training. The loss and
/// targets of a batch have the bits of an evaluation during training. Weights on NVMe are in an
/// unnamed file in nvme_path or ballast.out, which is created if necessary. Throws Error: see
/// setup::draw_evaluation(), engine::Engine; Error(data) if there is nothing to evaluate.
ModelEvaluation evaluate_model(const config::Config& config,
                               const ModelEvaluationProgress& progress,
                               const std::atomic<bool>* interrupted = nullptr);

}  // namespace ballast::train
