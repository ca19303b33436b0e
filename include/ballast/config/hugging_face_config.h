#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ballast/config/config.h"
#include "ballast/text/json.h"

namespace ballast::config {

inline constexpr const char* kCheckpointConfig = "config.json";

/// The model section that Hugging Face's config.json in `folder` describes, by the
/// Family::checkpoint_keys() of its family. Of a model of text and images it reads the text model.
/// Appends to `notes` the keys without effect here, such as dropout. Throws Error(config) naming
/// the file and the key: no such file, another family, a missing size, a value that the family does
/// not support, and a key that is unknown, since it may change what the model computes.
text::Json read_model_section(const std::filesystem::path& folder, std::vector<std::string>& notes);

/// Throws Error(config) if the model section of `config` disagrees with Hugging Face's config.json
/// `file`. Shapes alone do not show, for example, how many heads a matrix has. Accepts a file that
/// does not exist or has none of the family's keys.
void compare_with_checkpoint(const std::filesystem::path& file, const Config& config);

/// The config.json `json` of `file` as that of its text model alone; unchanged if it is not one of
/// several parts (text and images) that Ballast knows. Throws Error(config).
text::Json text_model_of(const text::Json& json, const std::filesystem::path& file);

/// Beginning of the names of the text model's modules in transformers' class of the config.json:
/// "model.", or "model.language_model." in a model of text and images. Throws Error(config).
std::string module_prefix(const text::Json& json, const std::filesystem::path& file);

/// The text of a config.json for dequantised weights: without its quantization_config; unchanged if
/// it has none. Throws Error(data).
std::string of_decoded_weights(const std::string& text);

/// The config.json `text` with this `quantization_config`, to whose list of modules that are not
/// quantised `modules` are added. Unchanged if it is the same already. Null: no
/// quantization_config.
std::string with_quantization(const std::string& text, text::Json quantization,
                              const std::vector<std::string>& modules);

/// Name of a type in config.json: "float32", "bfloat16", "float16".
std::string_view torch_name(DType type);

/// Hugging Face's config.json for the model of `config`.
text::Json make_checkpoint_config(const Config& config);

/// Explains why `path` is not a Hugging Face folder with a config.json, and what to do about it;
/// nothing if it is one. `given` is the path as the user wrote it: if nothing exists there, it may
/// be the id of a model on Hugging Face's hub. Recognises PEFT adapters, runs and exports of
/// Ballast, folders of Trainer and DeepSpeed, the hub's cache, GGUF, ONNX, diffusers and pickled
/// weights by the names of their files.
std::optional<std::string> explain_no_model(const std::filesystem::path& path,
                                            std::string_view given);

/// Like explain_no_model(), for a PEFT folder with an adapter_config.json.
std::optional<std::string> explain_no_adapters(const std::filesystem::path& path,
                                               std::string_view given);

/// Advice if nothing exists at a path that the user wrote as `given`: "", or how to download a
/// model if `given` can be the id of one.
std::string download_hint(std::string_view given);

}  // namespace ballast::config
