#include "src/train/initial_weights.h"

#include <filesystem>
#include <string>
#include <string_view>
#include <system_error>

#include <fmt/format.h>

#include "ballast/core/error.h"

#include "src/train/safetensors_header.h"

namespace ballast::train {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kKey = "model.weights";

[[noreturn]] void refuse(const std::string& message) {
  throw Error(ErrorCategory::data, message);
}

/// Refuses folders and indexes, which Hugging Face's own loader accepts.
void check_kind(const fs::path& path) {
  constexpr std::string_view kIndex = "model.safetensors.index.json";
  std::error_code ignored;
  if (!fs::is_directory(path, ignored)) {
    if (!path.native().ends_with(".index.json") || !fs::exists(path, ignored)) return;
    refuse(
        fmt::format("{} is the index of a sharded checkpoint, and sharded checkpoints are not "
                    "supported yet; give a single .safetensors file",
                    path.string()));
  }
  if (const fs::path single = path / "model.safetensors"; fs::exists(single, ignored)) {
    refuse(fmt::format("{} is a folder of a checkpoint; give its file {}", path.string(),
                       single.string()));
  }
  const bool sharded = fs::exists(path / kIndex, ignored);
  refuse(
      fmt::format("{} is a folder{}; give a single .safetensors file (sharded checkpoints are not "
                  "supported yet)",
                  path.string(), sharded ? " of a sharded checkpoint" : ""));
}

SafetensorsReader open(const fs::path& path) {
  try {
    return SafetensorsReader(path);
  } catch (const Error& error) {
    if (error.error_number() == 0) throw;
    throw Error(error.category(), fmt::format("cannot read {}", path.string()),
                error.error_number());
  }
}

void check_shape(const SafetensorsReader& file, const model::TensorSpec& tensor) {
  const StoredTensor* stored = file.find(tensor.name);
  if (stored == nullptr || stored->shape == tensor.shape) return;
  refuse(fmt::format("{}: tensor '{}' has shape {}, but the model needs {}", file.path().string(),
                     tensor.name, format_shape(stored->shape), format_shape(tensor.shape)));
}

void check_tensor(const SafetensorsReader& file, const model::TensorSpec& tensor) {
  const fs::path& path = file.path();
  // Hugging Face names the files of a sharded checkpoint model-00001-of-00002.safetensors.
  const bool shard = path.filename().string().find("-of-") != std::string::npos;
  if (shard && file.find(tensor.name) == nullptr) {
    refuse(
        fmt::format("{} is one file of a sharded checkpoint and has no tensor '{}'; give a single "
                    ".safetensors file (sharded checkpoints are not supported yet)",
                    path.string(), tensor.name));
  }
  file.read(tensor.name, {});  // throws for a missing tensor and for a wrong dtype
  check_shape(file, tensor);
}

void check(const config::Config& config) {
  check_kind(config.initial_weights);
  const SafetensorsReader file = open(config.initial_weights);
  const model::Architecture model = model::build_architecture(config.model);
  for (const model::BlockSpec& block : model.blocks) {
    for (const model::TensorSpec& tensor : block.tensors) check_tensor(file, tensor);
  }
}

}  // namespace

void check_initial_weights(const config::Config& config) {
  if (config.initial_weights.empty()) return;
  try {
    check(config);
  } catch (const Error& error) {
    throw error.with_context(kKey);
  }
}

void read_initial_weights(const SafetensorsReader& file, const model::TensorSpec& tensor,
                          std::span<float> out) {
  check_shape(file, tensor);
  file.read(tensor.name, out);
}

}  // namespace ballast::train
