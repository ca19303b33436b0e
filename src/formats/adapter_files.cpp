#include "src/formats/adapter_files.h"

#include <algorithm>
#include <system_error>
#include <unordered_set>

#include <fmt/format.h>

#include "ballast/config/adapter_folder.h"
#include "ballast/core/error.h"
#include "ballast/formats/safetensors_header.h"
#include "ballast/text/json.h"

namespace ballast::formats {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void refuse(const WeightFiles& files, const std::string& message) {
  throw Error(ErrorCategory::data, fmt::format("{}: {}", files.path().string(), message));
}

}  // namespace

AdapterFiles::AdapterFiles(const fs::path& folder) : files_(adapter_weights(folder)) {}

std::string AdapterFiles::name_of(const model::TensorSpec& tensor) {
  return config::kAdapterPrefix + tensor.name;
}

void AdapterFiles::check(const model::Architecture& model) const {
  std::unordered_set<const WeightPlace*> used;
  for (const model::BlockSpec& block : model.blocks) {
    for (const model::TensorSpec& tensor : block.tensors) {
      if (tensor.frozen) continue;
      const std::string name = name_of(tensor);
      const WeightPlace* const place = files_.find(name);
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
  for (const WeightPlace& place : files_.tensors()) {
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
