#include "src/formats/weight_causes.h"

#include <algorithm>
#include <cctype>
#include <cstring>
#include <string>
#include <system_error>
#include <vector>

#include <fmt/format.h>

#include "ballast/formats/stored_tensor.h"
#include "ballast/text/json.h"

namespace ballast::formats {
namespace {

namespace fs = std::filesystem;
using text::printable;

/// The extension of a name in lower case: ".bin".
std::string extension_of(const fs::path& path) {
  std::string end = path.extension().string();
  std::transform(end.begin(), end.end(), end.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return end;
}

std::vector<fs::path> entries_of(const fs::path& folder) {
  std::vector<fs::path> entries;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error); !error && entry != fs::directory_iterator();
       entry.increment(error)) {
    entries.push_back(entry->path());
  }
  std::sort(entries.begin(), entries.end());
  return entries;
}

/// Describes a file or folder next to config.json that is there instead of the weights.
std::string meaning_of(const fs::path& path) {
  const std::string name = path.filename().string();
  const std::string shown = printable(name);
  const std::string end = extension_of(path);
  std::error_code ignored;
  const bool is_folder = fs::is_directory(path, ignored);
  if (end == ".incomplete" || end == ".part" || end == ".crdownload" || end == ".aria2") {
    return fmt::format("; {} is a download that has not ended: finish it", shown);
  }
  if (is_folder && (name.starts_with("checkpoint-") || fs::exists(path / kSingleWeights, ignored) ||
                    fs::exists(path / kWeightsIndex, ignored))) {
    return fmt::format("; its folder {} has weights: give that", shown);
  }
  if (is_folder && name.starts_with("pytorch_model_fsdp")) {
    return fmt::format("; merge the shards in {} with accelerate merge-weights", shown);
  }
  if (is_folder && name.starts_with("global_step")) {
    return fmt::format(
        "; {} is a checkpoint of DeepSpeed: convert it with its zero_to_fp32.py and "
        "--safe_serialization",
        shown);
  }
  if (end == ".safetensors" && name.find("-of-") != std::string::npos) {
    return fmt::format("; it has {}, but the index of such files is missing: download {} too",
                       shown, kWeightsIndex);
  }
  if (end == ".safetensors") {
    return fmt::format(
        "; it has {}: if that is the model with transformers' names, rename it to {}", shown,
        kSingleWeights);
  }
  if (end == ".bin" || end == ".pt" || end == ".pth" || end == ".ckpt" || end == ".h5" ||
      end == ".msgpack") {
    if (name.starts_with("training_args") || name.starts_with("optimizer") ||
        name.starts_with("scheduler") || name.starts_with("rng_state")) {
      return "";
    }
    return fmt::format(
        "; it has {}: load it with transformers and save it with save_pretrained, "
        "which writes safetensors",
        shown);
  }
  if (end == ".gguf") {
    return fmt::format(
        "; it has {}: give the original model, or load it with transformers "
        "(from_pretrained with gguf_file) and save it",
        shown);
  }
  return "";
}

}  // namespace

std::string_view foreign_format(std::span<const std::byte> bytes) {
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  using namespace std::string_view_literals;
  // The length of a header in 8 bytes, followed by JSON. Lengths may look like the beginning of a
  // pickle.
  if (text.size() > sizeof(std::uint64_t) && text[sizeof(std::uint64_t)] == '{') return "";
  if (text.starts_with("version https://git-lfs")) {
    return "is a git-lfs pointer, not the file itself: run `git lfs pull` in its folder";
  }
  if (text.starts_with("PK\x03\x04") || text.starts_with("\x80\x02"sv)) {
    return "is a file of PyTorch, not safetensors: load it with transformers and save it with "
           "save_pretrained";
  }
  if (text.starts_with("GGUF")) {
    return "is GGUF, not safetensors: give the original model, or load it with transformers "
           "(from_pretrained with gguf_file) and save it";
  }
  if (text.starts_with("<!DOCTYPE") || text.starts_with("<!doctype") || text.starts_with("<html")) {
    return "is a web page, not safetensors: the download failed; repeat it";
  }
  if (text.starts_with("{\"") || text.starts_with("{\n")) {
    return "is JSON, not safetensors: an index must be called model.safetensors.index.json";
  }
  const bool empty = std::all_of(text.begin(), text.end(), [](char c) { return c == '\0'; });
  if (empty && text.size() >= sizeof(std::uint64_t)) {
    return "begins with zeros: its download or copy has not ended; repeat it";
  }
  return "";
}

std::string files_instead(const fs::path& folder) {
  for (const fs::path& path : entries_of(folder)) {
    if (std::string meaning = meaning_of(path); !meaning.empty()) return meaning;
  }
  for (const fs::path& path : entries_of(folder / ".cache" / "huggingface" / "download")) {
    if (extension_of(path) != ".incomplete") continue;
    return "; its download has not ended: finish it";
  }
  return "; download the weights into it";
}

std::string_view remedy_for_dtype(std::string_view dtype) {
  if (dtype.starts_with("F8_") || dtype.starts_with("F6_") || dtype.starts_with("F4")) {
    return "; it is quantised: give the folder of the original model, or load this one with "
           "transformers, dequantize() it and save it";
  }
  if (dtype == "I32" || dtype == "U8" || dtype == "I8") {
    return "; if it is quantised, give the folder of the original model";
  }
  return "; convert the model to one of these and save it again";
}

}  // namespace ballast::formats
