#include <algorithm>
#include <array>
#include <cctype>
#include <system_error>

#include <fmt/format.h>

#include "ballast/config/adapter_folder.h"
#include "ballast/config/hugging_face_config.h"
#include "ballast/core/error.h"
#include "ballast/text/files.h"
#include "ballast/text/json.h"

namespace ballast::config {
namespace {

namespace fs = std::filesystem;

bool has(const fs::path& folder, const char* name) {
  std::error_code ignored;
  return fs::exists(folder / name, ignored);
}

/// The name of a file or folder in `folder` with this beginning and end, the last one in order; ""
/// if there is none.
std::string find_name(const fs::path& folder, std::string_view beginning, std::string_view end) {
  std::string last;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), none; !error && entry != none;
       entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    if (name.starts_with(beginning) && name.ends_with(end)) last = std::max(last, name);
  }
  return last;
}

/// The base model that adapter_config.json names; "its base model" if it does not say.
std::string base_model(const fs::path& folder) {
  const std::string unknown = "its base model";
  try {
    const fs::path file = folder / kAdapterConfig;
    const text::Json json = text::parse_json(text::read_settings(file, "adapters"), file.string());
    const text::Json* const base = json.find("base_model_name_or_path");
    if (base == nullptr || !base->is_string() || base->text().empty()) return unknown;
    return text::printable(base->text());
  } catch (const Error&) {
    return unknown;
  }
}

std::string explain_adapters(const fs::path& folder) {
  const std::string base = base_model(folder);
  return fmt::format(
      "has PEFT adapters without their base model ({}); give the folder of {} as model.path "
      "and this one as ballast.adapters.path, with ballast.train \"adapters\"{}",
      kAdapterConfig, base,
      has(base, kCheckpointConfig)
          ? fmt::format(", or `ballast export {} --merged --out DIR` writes the whole model",
                        folder.string())
          : "");
}

/// A file that identifies the kind of a folder, with advice.
struct Trace {
  const char* file;
  std::string_view kind;
  std::string_view advice;
};
constexpr std::array<Trace, 8> kTraces = {{
    {"run.json", "is a run of Ballast",
     "`ballast export RUN --out DIR` writes its weights as a Hugging Face folder"},
    {"model_index.json", "is a pipeline of diffusers",
     "Ballast trains language models; give the folder of one"},
    {"params.json", "has a model in the format of its makers",
     "convert it to the format of transformers, or download the repository that has a config.json"},
    {"latest", "is a checkpoint of DeepSpeed",
     "its zero_to_fp32.py writes safetensors; copy the model's config.json to them"},
    {"zero_to_fp32.py", "is a checkpoint of DeepSpeed",
     "its zero_to_fp32.py writes safetensors; copy the model's config.json to them"},
    {"model.safetensors.index.json", "has weights without the config.json that describes them",
     "copy that of the model into it"},
    {"model.safetensors", "has weights without the config.json that describes them",
     "copy that of the model into it"},
    {"pytorch_model.bin", "has pickled weights without a config.json",
     "save the model with save_pretrained() of transformers, which writes safetensors"},
}};

std::string explain_folder(const fs::path& folder) {
  if (has(folder, kAdapterConfig)) return explain_adapters(folder);
  for (const Trace& trace : kTraces) {
    if (!has(folder, trace.file)) continue;
    std::string advice(trace.advice);
    const std::string_view place = "RUN";
    if (const auto at = advice.find(place); at != std::string::npos) {
      advice.replace(at, place.size(), folder.string());
    }
    return fmt::format("{}; {}", trace.kind, advice);
  }
  if (!find_name(folder, "", ".gguf").empty()) {
    return "has a model in GGUF; give the folder of the safetensors from which it was made";
  }
  if (has(folder, "onnx") || !find_name(folder, "", ".onnx").empty()) {
    return "has a model in ONNX; give the folder of the safetensors from which it was made";
  }
  // Trainer's output and the hub's cache contain folders of models.
  std::string inner = find_name(folder, "checkpoint-", "");
  if (inner.empty() && has(folder, "snapshots")) {
    inner = "snapshots/" + find_name(folder / "snapshots", "", "");
  }
  if (!inner.empty()) {
    return fmt::format("has no {}; give a folder in it, such as {}", kCheckpointConfig,
                       (folder / inner).string());
  }
  return fmt::format("has no {}; give the folder of a Hugging Face model", kCheckpointConfig);
}

std::string explain_file(const fs::path& file) {
  const std::string end = file.extension().string();
  if (end == ".gguf") {
    return "is a file in GGUF; give the folder of the safetensors from which it was made";
  }
  const bool part = file.filename() == kCheckpointConfig || end == ".safetensors" ||
                    end == ".bin" || end == ".pt" || end == ".pth";
  return part ? fmt::format("is a file; give its folder {}",
                            fs::absolute(file).parent_path().string())
              : "is a file; give the folder of a Hugging Face model";
}

}  // namespace

std::string download_hint(std::string_view given) {
  const auto allowed = [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '-' || c == '_' || c == '.' ||
           c == '/';
  };
  const bool one_slash = std::count(given.begin(), given.end(), '/') <= 1;
  const bool plain =
      !given.empty() && one_slash && std::all_of(given.begin(), given.end(), allowed);
  const bool begins = plain && std::isalnum(static_cast<unsigned char>(given.front())) != 0;
  constexpr std::array kFiles = {".json", ".jsonl", ".safetensors", ".bin", ".gguf", ".txt"};
  const bool file = std::any_of(kFiles.begin(), kFiles.end(),
                                [&](const char* end) { return given.ends_with(end); });
  if (!begins || file || given.ends_with('/')) return "";
  return fmt::format(
      "Ballast reads folders and downloads nothing; if this is a model on Hugging Face's hub, `hf "
      "download {} --local-dir DIR` makes its folder",
      given);
}

std::optional<std::string> explain_no_adapters(const fs::path& path, std::string_view given) {
  std::error_code ignored;
  if (has(path, kAdapterConfig)) return std::nullopt;
  if (!fs::exists(path, ignored)) return explain_no_model(path, given);
  if (has(path / "weights", kAdapterConfig)) {
    return fmt::format("{0} is a run of Ballast; give its adapters, {0}/weights", path.string());
  }
  return fmt::format("{} has no {}; {}", path.string(), kAdapterConfig,
                     has(path, kCheckpointConfig) ? "a whole model belongs into model.path"
                                                  : "give a PEFT folder");
}

std::optional<std::string> explain_no_model(const fs::path& path, std::string_view given) {
  std::error_code ignored;
  if (fs::is_directory(path, ignored)) {
    if (has(path, kCheckpointConfig) && !has(path, "run.json")) return std::nullopt;
    return fmt::format("{} {}", path.string(), explain_folder(path));
  }
  if (fs::exists(path, ignored)) return fmt::format("{} {}", path.string(), explain_file(path));
  const std::string hint = download_hint(given);
  return fmt::format("there is no folder {}{}", path.string(), hint.empty() ? "" : ". " + hint);
}

}  // namespace ballast::config
