#include "src/formats/adapter_files.h"

#include <algorithm>
#include <memory>
#include <mutex>
#include <system_error>
#include <unordered_set>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "ballast/config/adapter_folder.h"
#include "ballast/core/error.h"
#include "ballast/formats/safetensors_header.h"
#include "ballast/text/json.h"

namespace ballast::formats {
namespace {

namespace fs = std::filesystem;

/// Returns whether the tensor is the part of one expert in an adapter of all experts.
bool is_stacked(const model::TensorSpec& tensor) {
  const bool a = tensor.rows_in_all > tensor.shape.front();
  return tensor.adapter && (a || tensor.stored.column_step > 1);
}

std::uint64_t rank_of(const model::TensorSpec& tensor) {
  return tensor.shape[tensor.stored.column_step > 1 ? 1 : 0];
}

/// Returns the row in files of element `at` of B.
Elems row_in_files(const model::TensorSpec& b, Elems at) {
  return model::run_in_files(b, at).first / b.columns_in_all;
}

/// Returns the names of A and B of the adapter to which the tensor belongs.
std::pair<std::string, std::string> names_of_stack(const model::TensorSpec& tensor) {
  const std::string name = AdapterFiles::name_of(tensor);
  const std::string module = name.substr(0, name.size() - model::kFirstOfAdapter.size());
  return {module + std::string(model::kFirstOfAdapter),
          module + std::string(model::kSecondOfAdapter)};
}

}  // namespace

void refuse_adapters(const WeightFiles& files, const std::string& message) {
  throw Error(ErrorCategory::data, fmt::format("{}: {}", files.path().string(), message));
}

std::vector<float> read_whole(const WeightFiles& files, const StoredTensor& tensor) {
  std::vector<float> values(tensor.elements);
  files.read(tensor.name, values);
  return values;
}

std::vector<float> transposed(std::span<const float> from, std::size_t rows, std::size_t columns) {
  std::vector<float> to(from.size());
  for (std::size_t r = 0; r < rows; ++r) {
    for (std::size_t c = 0; c < columns; ++c) to[c * rows + r] = from[r * columns + c];
  }
  return to;
}

AdapterFiles::AdapterFiles(const fs::path& folder)
    : files_(adapter_weights(folder)), order_(StackedOrder::read(folder)) {}

std::string AdapterFiles::name_of(const model::TensorSpec& tensor) {
  return config::kAdapterPrefix +
         (tensor.name_in_files.empty() ? tensor.name : tensor.name_in_files);
}

void AdapterFiles::check(const model::Architecture& model) const {
  std::unordered_set<const WeightPlace*> used;
  for (const model::BlockSpec& block : model.blocks) {
    for (const model::TensorSpec& tensor : block.tensors) {
      if (tensor.frozen) continue;
      const std::string name = name_of(tensor);
      const WeightPlace* const place = files_.find(name);
      if (place == nullptr) {
        refuse_adapters(files_,
                        fmt::format("has no tensor '{}', which ballast.adapters trains; name the "
                                    "targets and modules_to_save of these adapters",
                                    name));
      }
      used.insert(place);
      if (is_stacked(tensor) && stack_of(tensor)->rank == rank_of(tensor)) continue;
      if (place->tensor->shape == tensor.whole_shape()) continue;
      refuse_adapters(files_, fmt::format("tensor '{}' has shape {}, but the model needs {}", name,
                                          format_shape(place->tensor->shape),
                                          format_shape(tensor.whole_shape())));
    }
  }
  for (const WeightPlace& place : files_.tensors()) {
    if (used.contains(&place)) continue;
    refuse_adapters(files_,
                    fmt::format("tensor '{}' belongs to nothing that ballast.adapters trains; name "
                                "the targets and modules_to_save of these adapters",
                                text::printable(place.tensor->name)));
  }
}

void AdapterFiles::read(const model::TensorSpec& tensor, Elems first, std::span<float> out) const {
  if (is_stacked(tensor)) {
    const std::shared_ptr<const StackedAdapter> stack = stack_of(tensor);
    const bool a = tensor.stored.column_step == 1;
    const std::uint64_t expert = a ? tensor.first_row / tensor.shape[0] : tensor.first_column;
    const std::span<const float> values = a ? stack->a_of(expert) : stack->b_of(expert);
    for (float& value : out) {
      // B has the order of rows of files.
      const Elems there =
          a ? first : row_in_files(tensor, first) * stack->rank + first % stack->rank;
      value = values[there];
      ++first;
    }
    return;
  }
  while (!out.empty()) {
    const model::TensorRun run = model::run_in_files(tensor, first);
    const auto count = std::min<Elems>(run.count, out.size());
    files_.read(name_of(tensor), out.first(count), run.first);
    out = out.subspan(count);
    first += count;
  }
}

std::shared_ptr<const StackedAdapter> AdapterFiles::stack_of(
    const model::TensorSpec& tensor) const {
  const auto [a, b] = names_of_stack(tensor);
  const std::lock_guard lock(*mutex_);
  for (const Stack& known : stacks_) {
    if (known.name == a) return known.adapter;
  }
  const bool first = name_of(tensor) == a;
  StackedOrder order = order_;
  order.can_be_exchanged = tensor.stored.once_exchanged;
  const std::uint64_t experts =
      first ? tensor.rows_in_all / tensor.shape[0] : tensor.stored.column_step;
  auto adapter = std::make_shared<const StackedAdapter>(read_stacked_adapter(
      files_, a, b, order, experts, first ? tensor.shape[1] : 0, first ? 0 : tensor.shape[0]));
  stacks_[1] = std::exchange(stacks_[0], {a, std::move(adapter)});
  return stacks_[0].adapter;
}

fs::path adapter_weights(const fs::path& folder) {
  std::error_code ignored;
  const fs::path pickled = folder / "adapter_model.bin";
  if (!fs::exists(folder / config::kAdapterWeights, ignored) && fs::exists(pickled, ignored)) {
    throw Error(ErrorCategory::data,
                fmt::format("{} is not safetensors; load the adapters with PEFT and save them with "
                            "save_pretrained, which writes {}",
                            pickled.string(), config::kAdapterWeights));
  }
  return folder / config::kAdapterWeights;
}

std::string adapter_folder_below(const fs::path& folder) {
  std::string last;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error); !error && entry != fs::directory_iterator();
       entry.increment(error)) {
    if (is_adapter_folder(entry->path())) last = std::max(last, entry->path().filename().string());
  }
  return last;
}

bool is_adapter_folder(const fs::path& folder) {
  std::error_code ignored;
  return fs::exists(folder / config::kAdapterConfig, ignored);
}

}  // namespace ballast::formats
