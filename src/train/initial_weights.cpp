#include "src/train/initial_weights.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "ballast/config/hugging_face_config.h"
#include "ballast/core/error.h"
#include "ballast/core/memory.h"
#include "ballast/formats/safetensors_header.h"
#include "ballast/formats/stored_weights.h"
#include "ballast/model/compute.h"
#include "ballast/model/family.h"
#include "ballast/setup/translate.h"
#include "ballast/text/json.h"

#include "src/formats/adapter_files.h"
#include "src/formats/folder_layout.h"
#include "src/formats/quantized_matrices.h"
#include "src/train/run_warnings.h"

namespace ballast::train {

namespace {

/// The exponent bits of a type in each element of a word, and the lowest of these bits. Adding that
/// bit carries into the sign only if the exponent is all ones, and never into the next element.
struct Exponents {
  std::uint64_t all;
  std::uint64_t lowest;
  std::uint64_t carry;
};

constexpr std::uint64_t in_each(std::uint64_t bits, unsigned width) {
  std::uint64_t word = bits;
  for (unsigned shift = width; shift < 64; shift *= 2) word |= word << shift;
  return word;
}

constexpr Exponents exponents_of(DType type) {
  switch (type) {
    case DType::bf16:
      return {in_each(0x7f80, 16), in_each(0x0080, 16), in_each(0x8000, 16)};
    case DType::f16:
      return {in_each(0x7c00, 16), in_each(0x0400, 16), in_each(0x8000, 16)};
    default:
      return {in_each(0x7f800000, 32), in_each(0x00800000, 32), in_each(0x80000000, 32)};
  }
}

bool has_not_finite(ConstHostBytes bytes, const Exponents& exponents) {
  std::uint64_t found = 0;
  std::size_t at = 0;
  for (; at + sizeof(std::uint64_t) <= bytes.size(); at += sizeof(std::uint64_t)) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes.data() + at, sizeof(word));
    found |= (word & exponents.all) + exponents.lowest;
  }
  if (at < bytes.size()) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes.data() + at, bytes.size() - at);
    found |= (word & exponents.all) + exponents.lowest;
  }
  return (found & exponents.carry) != 0;
}

float value_at(ConstHostBytes bytes, DType type, Elems index) {
  float value = 0.0F;
  const std::size_t width = size_of(type);
  std::array<std::byte, sizeof(float)> element{};
  std::memcpy(element.data(), bytes.data() + index * width, width);
  decode(ConstHostBytes(element).first(width), type, {&value, 1});
  return value;
}

}  // namespace

std::optional<Elems> first_not_finite(ConstHostBytes bytes, DType type) {
  if (!has_not_finite(bytes, exponents_of(type))) return std::nullopt;
  for (Elems i = 0; i < bytes.size() / size_of(type); ++i) {
    if (!std::isfinite(value_at(bytes, type, i))) return i;
  }
  return std::nullopt;
}

std::string explain_not_finite(const std::string& tensor, ConstHostBytes bytes, DType type,
                               Elems index, Elems first) {
  const float value = value_at(bytes, type, index);
  return fmt::format("tensor '{}' has {} at element {}, with which every loss would be NaN", tensor,
                     std::isnan(value) ? "NaN"
                     : value > 0.0F    ? "inf"
                                       : "-inf",
                     first + index);
}

namespace {

namespace fs = std::filesystem;

constexpr std::string_view kKey = "model.weights";

[[noreturn]] void refuse(const std::string& message) {
  throw Error(ErrorCategory::data, message);
}

/// `of_vocabulary`: the tensor has one row per token.
void check_shape(const formats::WeightFiles& files, const model::TensorSpec& tensor,
                 bool of_vocabulary = false) {
  const formats::WeightPlace* const stored = files.find(tensor.name);
  if (stored == nullptr || stored->tensor->shape == tensor.whole_shape()) return;
  const std::vector<std::uint64_t>& found = stored->tensor->shape;
  const std::vector<std::uint64_t> needed = tensor.whole_shape();
  const bool resized = of_vocabulary && found.size() == 2 && found[1] == needed[1];
  refuse(fmt::format("{}: tensor '{}' has shape {}, but the model needs {}{}",
                     stored->file->path().string(), tensor.name, formats::format_shape(found),
                     formats::format_shape(needed),
                     resized ? fmt::format("; the vocabulary was resized or padded: set "
                                           "vocab_size, also that of config.json, to {}",
                                           found[0])
                             : ""));
}

/// Returns the key that ties the embeddings of the weights at `path`. If there is a config.json
/// next to them, it is that file's, with which model.tie_embeddings must agree.
std::string tying_key(const fs::path& path) {
  const fs::path file = path.parent_path() / config::kCheckpointConfig;
  std::error_code ignored;
  if (!fs::exists(file, ignored)) return "model.tie_embeddings";
  return fmt::format("tie_word_embeddings in {}", file.string());
}

void check_tensor(const formats::WeightFiles& files, const model::Architecture& model,
                  const model::TensorSpec& tensor) {
  const fs::path& path = files.path();
  // Hugging Face names the files of a sharded model model-00001-of-00002.safetensors.
  const bool shard = path.filename().string().find("-of-") != std::string::npos;
  if (shard && files.find(tensor.name) == nullptr) {
    refuse(fmt::format("{} is one file of a sharded model and has no tensor '{}'; give the folder",
                       path.string(), tensor.name));
  }
  const bool is_output = tensor.name == model.outer.output;
  if (is_output && files.find(tensor.name) == nullptr &&
      formats::cause_of_missing(files.tensors(), tensor.name).empty()) {
    refuse(fmt::format("{} has no tensor '{}', so its embeddings are tied; set {} to true",
                       path.string(), tensor.name, tying_key(path)));
  }
  files.read(tensor.name, {});  // throws for a missing tensor and for a wrong dtype
  check_shape(files, tensor, is_output || tensor.name == model.outer.tokens);
}

/// A tied model has no output matrix, but a file may have a copy of the embedding.
void check_tied(const formats::WeightFiles& files, const model::Architecture& model) {
  const formats::WeightPlace* const output = files.find(model.outer.output);
  if (!model.config.tie_embeddings || output == nullptr) return;
  if (formats::have_equal_values(files, *output->tensor, *files.find(model.outer.tokens)->tensor))
    return;
  refuse(fmt::format(
      "{}: '{}' differs from '{}', so the file's embeddings are not tied; set {} to "
      "false",
      files.path().string(), model.outer.output, model.outer.tokens, tying_key(files.path())));
}

/// An extent of 0 matches any.
bool has_shape(const formats::StoredTensor& tensor, const std::vector<std::uint64_t>& shape) {
  return std::equal(
      tensor.shape.begin(), tensor.shape.end(), shape.begin(), shape.end(),
      [](std::uint64_t have, std::uint64_t want) { return want == 0 || have == want; });
}

/// Returns the places of the tensors that the model uses. A stack counts if all parts are used.
std::unordered_set<const formats::WeightPlace*> used_places(const formats::WeightFiles& files,
                                                            const model::Architecture& model) {
  std::unordered_set<const formats::WeightPlace*> used = {
      files.find(model.outer.output)};  // see check_tied()
  std::unordered_map<const formats::WeightPlace*, Elems> of_stacks;
  for (const model::BlockSpec& block : model.blocks) {
    for (const model::TensorSpec& tensor : block.tensors) {
      const formats::WeightPlace* const place = files.find(tensor.name);
      const bool added = used.insert(place).second;
      if (!added || place == nullptr || place->stack == nullptr) continue;
      Elems& elements = of_stacks[place->stack];
      elements += place->tensor->elements;
      if (elements == place->stack->tensor->elements) used.insert(place->stack);
    }
  }
  return used;
}

/// Refuses tensors that the model does not use, because the file then belongs to another model.
void check_unused(const formats::WeightFiles& files, const model::Architecture& model) {
  constexpr std::size_t kNamed = 3;
  const auto used = used_places(files, model);
  const auto buffers = model::family(model.config.family).checkpoint_buffers(model.config);
  std::string names;
  std::string cause;
  std::size_t unused = 0;
  for (const formats::WeightPlace& place : files.tensors()) {
    const formats::StoredTensor& tensor = *place.tensor;
    const bool buffer = std::any_of(buffers.begin(), buffers.end(), [&](const auto& known) {
      return tensor.name.ends_with(known.suffix) && has_shape(tensor, known.shape);
    });
    const auto part = formats::passing_part(files, tensor.name);
    const bool passes =
        part != formats::PassingPart::indexer || model.config.details.contains("index_topk");
    if (buffer || used.contains(&place) || (part && passes)) continue;
    if (cause.empty()) cause = formats::cause_of_unused(tensor.name);
    if (++unused <= kNamed) names += (names.empty() ? "" : ", ") + text::printable(tensor.name);
  }
  if (unused == 0) return;
  if (!cause.empty()) {
    refuse(fmt::format("{} has {} tensor{} that this model does not use ({}{}){}",
                       files.path().string(), unused, unused == 1 ? "" : "s", names,
                       unused > kNamed ? ", ..." : "", cause));
  }
  refuse(
      fmt::format("{} has {} tensor{} that this model does not use ({}{}); give the weights of "
                  "this model, or change the keys of model or of model.path's config.json to those "
                  "of the file",
                  files.path().string(), unused, unused == 1 ? "" : "s", names,
                  unused > kNamed ? ", ..." : ""));
}

void check(const config::Config& config) {
  const formats::WeightFiles files(config.initial_weights);
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
  const auto& adapters = config.ballast.adapters;
  std::string_view key = kKey;
  try {
    if (!config.initial_weights.empty()) check(config);
    key = "ballast.adapters.path";
    if (adapters && !adapters->path.empty()) {
      formats::AdapterFiles(adapters->path).check(setup::model_of(config));
    }
  } catch (const Error& error) {
    throw error.with_context(std::string(key));
  }
}

const formats::WeightPlace& place_of(const formats::WeightFiles& files,
                                     const model::TensorSpec& tensor) {
  const formats::WeightPlace* const place = files.find(tensor.name);
  if (place == nullptr) files.read(tensor.name, {});  // throws
  check_shape(files, tensor);
  return *place;
}

namespace {

/// Columns are short runs spread over the whole tensor. Reading ahead would read the whole tensor
/// for each tile. The page cache reads only the pages of the runs, and keeps pages that the next
/// tile shares. Lists of values that are split into addends are read once per addend.
bool is_read_ahead(const model::TensorSpec& tensor) {
  return !tensor.cuts_rows() && tensor.stored.addends == 1;
}

/// Whether the fill reads a tensor twice, the second time for the masters of weights of type
/// `masters_of`. bf16 weights represent bf16 values exactly.
bool is_read_twice(std::optional<DType> masters_of, DType stored) {
  return masters_of && *masters_of != DType::f32 &&
         (*masters_of != DType::bf16 || stored != DType::bf16);
}

/// Index of the tensor among those that files stack into one.
std::uint64_t index_of(const model::TensorSpec& tensor) {
  return tensor.first_row / tensor.shape.front();
}

}  // namespace

std::vector<formats::ReadAhead::Source> reading_order(const formats::WeightFiles& files,
                                                      const model::Architecture& model,
                                                      std::optional<DType> masters_of,
                                                      bool makes_magnitudes) {
  std::vector<formats::ReadAhead::Source> order;
  const auto add = [&](const model::TensorSpec& tensor, bool again) {
    if (!is_read_ahead(tensor)) return;
    const formats::WeightPlace* const place = files.find(tensor.name);
    if (place == nullptr || (again && !is_read_twice(masters_of, formats::type_of(*place)))) return;
    const Elems begin = tensor.first_element();
    const auto ranges = formats::stored_ranges(*place, begin, begin + tensor.size);
    order.insert(order.end(), ranges.begin(), ranges.end());
  };
  for (const model::BlockSpec& block : model.blocks) {
    for (const model::TensorSpec& tensor : block.tensors) {
      const bool magnitudes = makes_magnitudes && tensor.init == model::Init::row_norms;
      if (magnitudes) add(model::map_of_magnitudes(block, tensor), false);
    }
    for (const model::TensorSpec& tensor : block.tensors) add(tensor, false);
    if (!masters_of) continue;
    for (const model::TensorSpec& tensor : block.tensors) add(tensor, true);
  }
  return order;
}

void read_stored_weights(const formats::WeightPlace& place, formats::WeightReader& reader,
                         const model::TensorSpec& tensor, Elems first, HostBytes out) {
  const bool reordered = model::run_in_files(tensor, 0).count < tensor.size;
  if (tensor.stored.stacked > 0 && reordered) {
    return reader.slice(place, index_of(tensor))->read(tensor, first, out);
  }
  const Bytes width = size_of(formats::type_of(place));
  while (!out.empty()) {
    const model::TensorRun run = model::run_in_files(tensor, first);
    const auto count = std::min<Elems>(run.count, out.size() / width);
    formats::read_elements(place, run.first, out.first(count * width),
                           is_read_ahead(tensor) ? &reader.ahead() : nullptr);
    out = out.subspan(count * width);
    first += count;
  }
}

void read_initial_weights(const formats::WeightPlace& place, formats::WeightReader& reader,
                          const model::TensorSpec& tensor, Elems first, std::span<float> out) {
  const DType type = formats::type_of(place);
  thread_local std::vector<std::byte> buffer;  // shared by the many calls
  const Bytes bytes = out.size() * size_of(type);
  buffer.resize(std::max<std::size_t>(buffer.size(), bytes));
  const HostBytes stored = HostBytes(buffer).first(bytes);
  read_stored_weights(place, reader, tensor, first, stored);
  decode(stored, type, out);
  model::split_into_addends(tensor, first, out);
}

namespace {

/// The files from which training begins: the model's and its adapters', if given. Counts the bytes
/// read.
class InitialWeights : public engine::WeightSource {
 public:
  using Progress = std::function<void(Bytes done, Bytes total)>;

  InitialWeights(const config::Config& config, const engine::Blueprint& blueprint,
                 Progress progress)
      : seed_(config.ballast.seed),
        quantization_(blueprint.model.quantization),
        progress_(std::move(progress)),
        routers_(blueprint.model, blueprint.type),
        masters_of_(blueprint.options.purpose == step::Purpose::training
                        ? std::optional(blueprint.type)
                        : std::nullopt) {
    const auto& adapters = config.ballast.adapters;
    if (adapters && !adapters->path.empty()) adapters_.emplace(adapters->path);
    if (config.initial_weights.empty()) return;
    files_.emplace(config.initial_weights);
    reader_.emplace(*files_, reading_order(*files_, blueprint.own(), masters_of_, !adapters_));
    bytes_ = files_->bytes();
    for (const auto& [part, totals] : formats::passing_totals(*files_)) bytes_ -= totals.bytes;
    for (const model::BlockSpec& block : blueprint.own().blocks) {
      for (const model::TensorSpec& tensor : block.tensors) {
        if (adapters_ || tensor.init != model::Init::row_norms) continue;
        const model::TensorSpec& map = model::map_of_magnitudes(block, tensor);
        if (!map.quantized)
          bytes_ += bytes_of(map, map.size);  // quantised maps are already in memory
      }
    }
  }

  [[nodiscard]] const RoundedRouters& routers() const { return routers_; }
  /// Returns whether everything is drawn from the seed.
  [[nodiscard]] bool empty() const { return !files_ && !adapters_; }

  void read(const model::TensorSpec& tensor, Elems first, std::span<float> out) override {
    if (adapters_ && !tensor.frozen) {
      adapters_->read(tensor, first, out);
    } else if (is_of_model(tensor)) {
      read_initial_weights(place_of(*files_, tensor), *reader_, tensor, first, out);
      routers_.add(tensor, out);
    } else {
      model::initialize(tensor, seed_, first, out);
    }
    if (is_stored(tensor)) check_finite(tensor, std::as_bytes(out), DType::f32, first);
    count(bytes_of(tensor, out.size()));
  }
  [[nodiscard]] bool has_magnitudes() override { return adapters_.has_value(); }
  [[nodiscard]] bool is_bf16(const model::TensorSpec& tensor) override {
    return is_of_model(tensor) && tensor.stored.addends == 1 &&
           formats::type_of(place_of(*files_, tensor)) == DType::bf16;
  }
  void read_bf16(const model::TensorSpec& tensor, Elems first, HostBytes out) override {
    read_stored_weights(place_of(*files_, tensor), *reader_, tensor, first, out);
    check_finite(tensor, out, DType::bf16, first);
    count(out.size());
  }
  /// A tensor whose rows have another order in files has other quantisation blocks.
  bool read_codes(const model::TensorSpec& tensor, HostBytes out) override {
    if (!is_of_model(tensor)) return false;
    const model::Quantization& wanted = *quantization_;
    const formats::WeightPlace& place = place_of(*files_, tensor);
    const bool whole = tensor.size == place.tensor->elements && tensor.stored.stacked == 0 &&
                       model::run_in_files(tensor, 0).count == tensor.size;
    if (!whole || !formats::bitsandbytes::has_codes(place, wanted)) return false;
    formats::bitsandbytes::read_codes(place, wanted, out, &reader_->ahead());
    const model::QuantizedArrays arrays(wanted, tensor.size);
    const auto check_scales = [&](Bytes offset, Elems count) {
      check_finite(tensor, out.subspan(offset, count * sizeof(float)), DType::f32, 0);
    };
    if (arrays.nested_count == 0) check_scales(arrays.scales, arrays.scales_count);
    if (arrays.nested_count > 0) check_scales(arrays.nested, arrays.nested_count);
    if (arrays.nested_count > 0) check_scales(arrays.mean, 1);
    count(bytes_of(tensor, tensor.size));
    return true;
  }

 private:
  [[nodiscard]] bool is_of_model(const model::TensorSpec& tensor) const {
    return files_ && !tensor.adapter && (!adapters_ || tensor.frozen);
  }
  [[nodiscard]] bool is_stored(const model::TensorSpec& tensor) const {
    return is_of_model(tensor) || (adapters_ && !tensor.frozen);
  }
  /// Returns the bytes to read for `values` values of the tensor.
  [[nodiscard]] Bytes bytes_of(const model::TensorSpec& tensor, std::size_t values) const {
    if (!is_of_model(tensor)) return 0;
    const DType type = formats::type_of(place_of(*files_, tensor));
    // A tensor that is read twice counts half each time.
    return values * size_of(type) / (is_read_twice(masters_of_, type) ? 2 : 1);
  }
  void count(Bytes bytes) {
    const std::lock_guard lock(mutex_);
    done_ += bytes;
    progress_(done_, bytes_);
  }

  /// Refuses non-finite values of the tensor, which were read from element `first` on.
  void check_finite(const model::TensorSpec& tensor, ConstHostBytes values, DType type,
                    Elems first) const {
    const std::optional<Elems> bad = first_not_finite(values, type);
    if (!bad) return;
    const bool adapter = adapters_ && !tensor.frozen;
    refuse(fmt::format(
        "{}: {}: {}; give weights that are finite", adapter ? "ballast.adapters.path" : kKey,
        (adapter ? adapters_->files().path() : place_of(*files_, tensor).file->path()).string(),
        explain_not_finite(tensor.name, values, type, *bad, first)));
  }

  std::uint64_t seed_;
  std::optional<model::Quantization> quantization_;
  Progress progress_;
  RoundedRouters routers_;
  std::mutex mutex_;
  Bytes done_ = 0;
  std::optional<DType> masters_of_;
  std::optional<formats::WeightFiles> files_;
  Bytes bytes_ = 0;  ///< total bytes to read
  std::optional<formats::WeightReader> reader_;
  std::optional<formats::AdapterFiles> adapters_;
};

}  // namespace

void start_from_weights(engine::Engine& engine, const config::Config& config,
                        const std::function<void(Bytes done, Bytes total)>& reading) {
  InitialWeights weights(config, engine.blueprint(), reading);
  if (weights.empty()) return engine.start();
  engine.start(weights);
  const std::string warning = weights.routers().warning();
  if (!warning.empty() && engine.blueprint().mesh.rank == 0) log(LogLevel::warning, warning);
}

}  // namespace ballast::train
