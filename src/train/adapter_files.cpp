#include "src/train/adapter_files.h"

#include <algorithm>
#include <cmath>
#include <system_error>
#include <unordered_set>
#include <utility>

#include <fmt/format.h>

#include "ballast/config/adapter_folder.h"
#include "ballast/core/error.h"
#include "ballast/text/files.h"
#include "ballast/text/json.h"

#include "src/model/host/team.h"
#include "src/train/safetensors_header.h"

namespace ballast::train {
namespace {

namespace fs = std::filesystem;
using text::Json;

constexpr std::string_view kFirst = ".lora_A.weight";
constexpr std::string_view kSecond = ".lora_B.weight";
constexpr std::string_view kMagnitudes = ".lora_magnitude_vector";

/// Elements of a merged tensor that a thread takes at least, and that are read at a time.
constexpr Elems kUnit = Elems{1} << 10;
constexpr Elems kAtATime = Elems{1} << 18;

[[noreturn]] void refuse(const WeightFiles& files, const std::string& message) {
  throw Error(ErrorCategory::data, fmt::format("{}: {}", files.path().string(), message));
}

std::vector<float> read_whole(const WeightFiles& files, const StoredTensor& tensor) {
  std::vector<float> values(tensor.elements);
  files.read(tensor.name, values);
  return values;
}

std::vector<float> transposed(const std::vector<float>& from, std::size_t rows,
                              std::size_t columns) {
  std::vector<float> to(from.size());
  for (std::size_t r = 0; r < rows; ++r) {
    for (std::size_t c = 0; c < columns; ++c) to[c * rows + r] = from[r * columns + c];
  }
  return to;
}

Json read_description(const fs::path& folder) {
  const fs::path path = folder / config::kAdapterConfig;
  return text::parse_json(text::read_settings(path, "adapters"), path.string(),
                          {.category = ErrorCategory::data});
}

}  // namespace

AdapterFiles::AdapterFiles(const fs::path& folder) : files_(folder / config::kAdapterWeights) {}

std::string AdapterFiles::name_of(const model::TensorSpec& tensor) {
  return config::kAdapterPrefix + tensor.name;
}

void AdapterFiles::check(const model::Architecture& model) const {
  std::unordered_set<const WeightFiles::Place*> used;
  for (const model::BlockSpec& block : model.blocks) {
    for (const model::TensorSpec& tensor : block.tensors) {
      if (tensor.frozen) continue;
      const std::string name = name_of(tensor);
      const WeightFiles::Place* const place = files_.find(name);
      if (place == nullptr) {
        refuse(files_, fmt::format("has no tensor '{}', which ballast.adapters trains; name the "
                                   "targets and modules_to_save of these adapters",
                                   name));
      }
      used.insert(place);
      if (place->tensor->shape == tensor.whole_shape()) continue;
      refuse(files_,
             fmt::format("tensor '{}' has shape {}, but the model needs {}", name,
                         format_shape(place->tensor->shape), format_shape(tensor.whole_shape())));
    }
  }
  for (const WeightFiles::Place& place : files_.tensors()) {
    if (used.contains(&place)) continue;
    refuse(files_, fmt::format("tensor '{}' belongs to nothing that ballast.adapters trains; name "
                               "the targets and modules_to_save of these adapters",
                               text::printable(place.tensor->name)));
  }
}

void AdapterFiles::read(const model::TensorSpec& tensor, Elems first, std::span<float> out) const {
  while (!out.empty()) {
    const model::TensorRun run = model::run_in_files(tensor, first);
    const auto count = std::min<Elems>(run.count, out.size());
    files_.read(name_of(tensor), out.first(count), run.first);
    out = out.subspan(count);
    first += count;
  }
}

MergedAdapters::MergedAdapters(const WeightFiles& base, const fs::path& folder)
    : base_(base), adapters_(folder) {
  const Json settings = config::read_adapter_folder(folder);
  model::AdapterConfig described;
  if (const Json* const rank = settings.find("rank")) {
    described.rank = rank->whole().value_or(0);
  }
  if (const Json* const alpha = settings.find("alpha")) described.alpha = alpha->number();
  if (const Json* const root = settings.find("rslora")) described.rslora = root->flag();
  if (const Json* const dora = settings.find("dora")) dora_ = dora->flag();
  const Json whole = read_description(folder);
  const Json* const flipped = whole.find("fan_in_fan_out");
  input_first_ = flipped != nullptr && flipped->flag();
  rank_ = described.rank;
  scale_ = static_cast<float>(described.scale());
  const std::size_t prefix = std::string_view(config::kAdapterPrefix).size();
  for (const Place& place : adapters_.files().tensors()) {
    const std::string& name = place.tensor->name;
    if (!name.starts_with(config::kAdapterPrefix) || name.ends_with(kSecond)) continue;
    if (dora_ && name.ends_with(kMagnitudes)) continue;
    const bool adapter = name.ends_with(kFirst);
    const std::string module = name.substr(0, name.size() - (adapter ? kFirst.size() : 0));
    const std::string target = module.substr(prefix) + (adapter ? ".weight" : "");
    const Place* const found = base_.find(target);
    if (found == nullptr) {
      refuse(adapters_.files(),
             fmt::format("tensor '{}' belongs to '{}', which {} lacks", text::printable(name),
                         text::printable(target), base_.path().string()));
    }
    if (adapter) {
      add_product(*found, module);
    } else if (found->tensor->shape == place.tensor->shape) {
      changes_[found].replacement = &place;
    } else {
      refuse(adapters_.files(),
             fmt::format("tensor '{}' has not the shape of the model's", text::printable(name)));
    }
  }
}

void MergedAdapters::add_product(const Place& weight, const std::string& module) {
  const WeightFiles& files = adapters_.files();
  const StoredTensor& a = *files.find(module + std::string(kFirst))->tensor;
  const Place* const b = files.find(module + std::string(kSecond));
  const auto fits = [&](std::size_t in, std::size_t out) {
    return a.shape == std::vector<std::uint64_t>{rank_, in} && b != nullptr &&
           b->tensor->shape == std::vector<std::uint64_t>{out, rank_};
  };
  const std::vector<std::uint64_t>& shape = weight.tensor->shape;
  const bool matrix = shape.size() == 2;
  const bool straight = matrix && fits(shape[1], shape[0]);
  if (!straight && !(matrix && fits(shape[0], shape[1]))) {
    refuse(files, fmt::format("'{}' has no A and B of rank {} for the model's map of shape {}",
                              text::printable(module), rank_, format_shape(shape)));
  }
  // A square map is one of GPT-2's only if the folder says so.
  const bool input_first = !straight || (shape[0] == shape[1] && input_first_);
  Change& change = changes_[&weight];
  change.left = read_whole(files, *b->tensor);
  change.right = read_whole(files, a);
  change.of_columns = input_first;
  if (dora_) {
    const std::uint64_t out = shape[input_first ? 1 : 0];
    change.magnitudes = files.find(module + std::string(kMagnitudes));
    if (change.magnitudes == nullptr ||
        change.magnitudes->tensor->shape != std::vector<std::uint64_t>{out}) {
      refuse(files, fmt::format("'{}' has no lora_magnitude_vector of {} values, but "
                                "adapter_config.json says use_dora",
                                text::printable(module), out));
    }
  }
  if (!input_first) return;
  std::swap(change.left, change.right);
  change.left = transposed(change.left, rank_, shape[0]);
  change.right = transposed(change.right, shape[1], rank_);
}

void MergedAdapters::apply(const Place& place, Elems first, std::span<float> values) {
  Change& change = changes_.at(&place);
  if (change.replacement != nullptr) {
    return adapters_.files().read(change.replacement->tensor->name, values, first);
  }
  if (change.magnitudes != nullptr && first == 0) compute_gains(place, change);
  model::host::split(values.size(), kUnit, [&](model::host::Range r) {
    const std::span<float> part = values.subspan(r.begin, r.size());
    add(place, change, first + r.begin, part);
    if (change.gains.empty()) return;
    const std::size_t columns = place.tensor->shape[1];
    for (std::size_t i = 0; i < part.size(); ++i) {
      const std::size_t at = first + r.begin + i;
      part[i] *= change.gains[change.of_columns ? at % columns : at / columns];
    }
  });
}

void MergedAdapters::add(const Place& place, const Change& change, Elems first,
                         std::span<float> values) const {
  const std::size_t columns = place.tensor->shape[1];
  std::vector<float> sums;
  while (!values.empty()) {
    const std::size_t row = first / columns;
    const std::size_t column = first % columns;
    const std::size_t count = std::min(values.size(), columns - column);
    sums.assign(count, 0.0F);
    for (std::size_t k = 0; k < rank_; ++k) {
      const float factor = change.left[row * rank_ + k];
      const float* const from = change.right.data() + k * columns + column;
      for (std::size_t i = 0; i < count; ++i) sums[i] += factor * from[i];
    }
    for (std::size_t i = 0; i < count; ++i) values[i] += scale_ * sums[i];
    values = values.subspan(count);
    first += count;
  }
}

void MergedAdapters::compute_gains(const Place& place, Change& change) const {
  change.gains = read_whole(adapters_.files(), *change.magnitudes->tensor);
  const std::size_t rows = place.tensor->shape[0];
  const std::size_t columns = place.tensor->shape[1];
  std::vector<double> squares(change.gains.size(), 0.0);
  std::vector<float> values;
  for (std::size_t row = 0; row < rows; row += values.size() / columns) {
    const std::size_t count = std::clamp<std::size_t>(kAtATime / columns, 1, rows - row);
    values.resize(count * columns);
    base_.read(place.tensor->name, values, row * columns);
    model::host::split(count, 1, [&](model::host::Range r) {
      const Elems first = r.begin * columns;
      add(place, change, row * columns + first,
          std::span(values).subspan(first, r.size() * columns));
    });
    // Each thread has norms of its own.
    model::host::split(change.of_columns ? columns : count, 1, [&](model::host::Range r) {
      const model::host::Range of_rows = change.of_columns ? model::host::Range{0, count} : r;
      const model::host::Range of_columns = change.of_columns ? r : model::host::Range{0, columns};
      for (std::size_t i = of_rows.begin; i < of_rows.end; ++i) {
        for (std::size_t j = of_columns.begin; j < of_columns.end; ++j) {
          const double value = values[i * columns + j];
          squares[change.of_columns ? j : row + i] += value * value;
        }
      }
    });
  }
  for (std::size_t i = 0; i < squares.size(); ++i) {
    change.gains[i] =
        squares[i] > 0.0 ? static_cast<float>(change.gains[i] / std::sqrt(squares[i])) : 0.0F;
  }
}

fs::path base_of_adapters(const fs::path& folder) {
  const Json settings = read_description(folder);
  const Json* const base = settings.find("base_model_name_or_path");
  const std::string file = (folder / config::kAdapterConfig).string();
  if (base == nullptr || !base->is_string() || base->text().empty()) {
    throw Error(ErrorCategory::data,
                fmt::format("{}: names no base_model_name_or_path to merge with: training began "
                            "with random weights; set it to the folder of the model",
                            file));
  }
  std::error_code ignored;
  if (fs::exists(base->text(), ignored)) return base->text();
  throw Error(ErrorCategory::data,
              fmt::format("{}: base_model_name_or_path {} does not exist; set it to the folder of "
                          "the model",
                          file, text::printable(base->text())));
}

bool is_adapter_folder(const fs::path& folder) {
  std::error_code ignored;
  return fs::exists(folder / config::kAdapterConfig, ignored);
}

}  // namespace ballast::train
