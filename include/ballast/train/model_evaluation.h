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
  /// A config, a run directory or a folder of Hugging Face.
  std::filesystem::path path;
  /// Files instead of the data that the config or run names: documents, pairs, tokens or text, by
  /// their content, and if that does not say by their names (.safetensors, .bin, .npy). A folder of
  /// Hugging Face needs them.
  std::vector<std::string> data;
  std::uint64_t sequence_length = 0;   ///< 0: the config's; for a folder see kFolderLength
  std::vector<std::string> overrides;  ///< of the config, as in config::load()
};

/// Most tokens per sequence for a folder of Hugging Face, unless its model allows fewer.
inline constexpr std::uint64_t kFolderLength = 4096;

/// The config that evaluates `request`: data.eval are its files, model.weights those of the run or
/// folder. Throws Error(usage) for data that are missing or of several kinds, Error(data) for a run
/// without weights, and like config::load().
config::Config read_evaluation(const EvaluationRequest& request);

struct ModelEvaluation {
  double loss = 0.0;            ///< mean cross-entropy per target that counts, nats
  std::uint64_t targets = 0;    ///< that count
  std::uint64_t sequences = 0;  ///< of sequence_length tokens
  double seconds = 0.0;         ///< of the batches, without reading the weights
  std::string device;
  std::vector<std::string> placement;  ///< engine::describe_placement()
  std::vector<Bytes> allocated;        ///< by tier
};

/// Called before each part of the work: what it is ("reading weights", "evaluating"), what is done
/// of it and the whole, in bytes or micro-batches.
using ModelEvaluationProgress =
    std::function<void(std::string_view what, std::uint64_t done, std::uint64_t total)>;

/// Evaluates the model of `config` on all of its data for evaluation (data.eval or the held-out
/// part), on one device, with memory for weights and activations but not for training. Loss and
/// targets of a batch have the bits of an evaluation while training. Weights on NVMe are in a
/// nameless file in nvme_path or ballast.out, a directory that is made for it. Throws Error: see
/// planner::draw_evaluation(), engine::Engine; Error(data) if there is nothing to evaluate.
ModelEvaluation evaluate_model(const config::Config& config,
                               const ModelEvaluationProgress& progress,
                               const std::atomic<bool>* interrupted = nullptr);

}  // namespace ballast::train
