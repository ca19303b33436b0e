#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "ballast/text/json.h"

namespace ballast::config {

/// The text model in the config.json of a model of text and images (or audio).
struct TextPart {
  text::Json json;    ///< the config.json of the text model alone
  std::string label;  ///< place of its keys, for messages: "FILE, text_config"
  /// Beginning of its modules' names in transformers' class of the whole model, which has "model."
  /// in the class of the text model alone.
  std::string prefix;
};

/// Returns the text model that the config.json `json` of `file` describes: in text_config, or, for
/// earlier folders of Qwen, among the other keys. Keys that transformers reads outside text_config
/// (tie_word_embeddings, quantization_config) and the defaults of its class are filled in. Nothing
/// if `json` is not a model of several parts, or of a type whose text model Ballast does not know.
/// Throws Error(config) if text_config has no model_type.
std::optional<TextPart> find_text_part(const text::Json& json, const std::filesystem::path& file);

/// The types of models for find_text_part(): "gemma3, llava, ...".
std::string wrapper_types();

}  // namespace ballast::config
