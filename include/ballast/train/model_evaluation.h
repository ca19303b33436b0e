#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "ballast/config/config.h"
#include "ballast/core/units.h"

namespace ballast::train {

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
/// planner::draw_evaluation(), engine::Engine; Error(data) if there is nothing to evaluate.
ModelEvaluation evaluate_model(const config::Config& config,
                               const ModelEvaluationProgress& progress,
                               const std::atomic<bool>* interrupted = nullptr);

}  // namespace ballast::train
