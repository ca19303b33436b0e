#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

namespace ballast::config {

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
