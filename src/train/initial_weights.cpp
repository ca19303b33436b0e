#include "src/train/initial_weights.h"

#include <algorithm>
#include <filesystem>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "ballast/config/checkpoint_config.h"
#include "ballast/core/convert.h"
#include "ballast/core/error.h"
#include "ballast/model/family.h"
#include "ballast/text/json.h"

#include "src/train/safetensors_header.h"

namespace ballast::train {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kKey = "model.weights";

[[noreturn]] void refuse(const std::string& message) {
  throw Error(ErrorCategory::data, message);
}

void check_shape(const WeightFiles& files, const model::TensorSpec& tensor) {
  const WeightFiles::Place* const stored = files.find(tensor.name);
  if (stored == nullptr || stored->tensor->shape == tensor.shape) return;
  refuse(fmt::format("{}: tensor '{}' has shape {}, but the model needs {}",
                     stored->file->path().string(), tensor.name,
                     format_shape(stored->tensor->shape), format_shape(tensor.shape)));
}

void check_tensor(const WeightFiles& files, const model::Architecture& model,
                  const model::TensorSpec& tensor) {
  const fs::path& path = files.path();
  // Hugging Face names the files of a sharded model model-00001-of-00002.safetensors.
  const bool shard = path.filename().string().find("-of-") != std::string::npos;
  if (shard && files.find(tensor.name) == nullptr) {
    refuse(fmt::format("{} is one file of a sharded model and has no tensor '{}'; give the folder",
                       path.string(), tensor.name));
  }
  if (tensor.name == model.outer.output && files.find(tensor.name) == nullptr) {
    refuse(
        fmt::format("{} has no tensor '{}', so its embeddings are tied; set "
                    "model.tie_embeddings to true",
                    path.string(), tensor.name));
  }
  files.read(tensor.name, {});  // throws for a missing tensor and for a wrong dtype
  check_shape(files, tensor);
}

/// Compares values, since the two may have different dtypes. Reads both in pieces.
bool are_equal(const WeightFiles& files, const StoredTensor& one, const StoredTensor& other) {
  constexpr Elems kPiece = Elems{1} << 20;
  if (one.shape != other.shape) return false;
  std::vector<float> left;
  std::vector<float> right;
  for (Elems done = 0; done < one.elements; done += left.size()) {
    left.resize(std::min(kPiece, one.elements - done));
    right.resize(left.size());
    files.read(one.name, left, done);
    files.read(other.name, right, done);
    if (left != right) return false;
  }
  return true;
}

/// A tied model has no output matrix; a file may hold it as a copy of the embedding.
void check_tied(const WeightFiles& files, const model::Architecture& model) {
  const WeightFiles::Place* const output = files.find(model.outer.output);
  if (!model.config.tie_embeddings || output == nullptr) return;
  if (are_equal(files, *output->tensor, *files.find(model.outer.tokens)->tensor)) return;
  refuse(
      fmt::format("{}: '{}' differs from '{}', so the file's embeddings are not tied; set "
                  "model.tie_embeddings to false",
                  files.path().string(), model.outer.output, model.outer.tokens));
}

/// An extent of 0 stands for any.
bool has_shape(const StoredTensor& tensor, const std::vector<std::uint64_t>& shape) {
  return std::equal(
      tensor.shape.begin(), tensor.shape.end(), shape.begin(), shape.end(),
      [](std::uint64_t have, std::uint64_t want) { return want == 0 || have == want; });
}

/// Refuses tensors that the model does not use: without them the file is another model.
void check_unused(const WeightFiles& files, const model::Architecture& model) {
  constexpr std::size_t kNamed = 3;
  std::unordered_set<const WeightFiles::Place*> used = {
      files.find(model.outer.output)};  // see check_tied()
  for (const model::BlockSpec& block : model.blocks) {
    for (const model::TensorSpec& tensor : block.tensors) used.insert(files.find(tensor.name));
  }
  const auto buffers = model::family(model.config.family).checkpoint_buffers(model.config);
  std::string names;
  std::size_t unused = 0;
  for (const WeightFiles::Place& place : files.tensors()) {
    const StoredTensor& tensor = *place.tensor;
    const bool buffer = std::any_of(buffers.begin(), buffers.end(), [&](const auto& known) {
      return tensor.name.ends_with(known.suffix) && has_shape(tensor, known.shape);
    });
    if (buffer || used.contains(&place)) continue;
    if (++unused <= kNamed) names += (names.empty() ? "" : ", ") + text::printable(tensor.name);
  }
  if (unused == 0) return;
  refuse(
      fmt::format("{} has {} tensor{} that this model does not use ({}{}); change the keys of "
                  "model to those of the file, or give the weights of this model",
                  files.path().string(), unused, unused == 1 ? "" : "s", names,
                  unused > kNamed ? ", ..." : ""));
}

void check(const config::Config& config) {
  const WeightFiles files(config.initial_weights);
  config::compare_with_checkpoint(files.path().parent_path() / config::kCheckpointConfig, config);
  const model::Architecture model = model::build_architecture(config.model);
  for (const model::BlockSpec& block : model.blocks) {
    for (const model::TensorSpec& tensor : block.tensors) check_tensor(files, model, tensor);
  }
  check_unused(files, model);
  check_tied(files, model);
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

void read_initial_weights(const WeightFiles& files, ReadAhead& reader,
                          const model::TensorSpec& tensor, Elems first, std::span<float> out) {
  files.read(tensor.name, {});  // throws for a missing tensor and for a wrong dtype
  check_shape(files, tensor);
  const WeightFiles::Place& place = *files.find(tensor.name);
  const DType type = type_of(place);
  thread_local std::vector<std::byte> buffer;  // one for all calls: they are many
  while (!out.empty()) {
    const model::TensorRun run = model::run_in_files(tensor, first);
    const auto count = std::min<Elems>(run.count, out.size());
    const Bytes bytes = count * size_of(type);
    buffer.resize(std::max<std::size_t>(buffer.size(), bytes));
    const HostBytes stored = HostBytes(buffer).first(bytes);
    reader.read(place, run.first * size_of(type), stored);
    decode(stored, type, out.first(count));
    out = out.subspan(count);
    first += count;
  }
}

void start_from_weights(engine::Engine& engine, const std::filesystem::path& weights,
                        const std::function<void(Bytes done, Bytes total)>& reading) {
  if (weights.empty()) return engine.start();
  const WeightFiles files(weights);
  std::vector<const WeightFiles::Place*> order;
  for (const model::BlockSpec& block : engine.blueprint().model.blocks) {
    for (const model::TensorSpec& tensor : block.tensors) order.push_back(files.find(tensor.name));
  }
  ReadAhead reader(files, order);
  const Bytes total = files.bytes();
  Bytes done = 0;
  std::set<std::pair<std::string, Elems>> seen;  // pieces are asked for again, for remainders
  std::mutex mutex;
  const auto read = [&](const model::TensorSpec& tensor, Elems first, std::span<float> out) {
    read_initial_weights(files, reader, tensor, first, out);
    const std::lock_guard lock(mutex);
    if (!seen.emplace(tensor.name, first).second) return;
    done += files.find(tensor.name)->tensor->bytes / tensor.size * out.size();
    reading(done, total);
  };
  const auto is_bf16 = [&](const model::TensorSpec& tensor) {
    const WeightFiles::Place* const place = files.find(tensor.name);
    return place != nullptr && type_of(*place) == DType::bf16;
  };
  engine.start({read, is_bf16});
}

}  // namespace ballast::train
