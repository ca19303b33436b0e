#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "ballast/core/memory.h"
#include "ballast/core/units.h"
#include "ballast/model/family.h"
#include "ballast/text/json.h"

namespace ballast::config {

/// Longest header of a safetensors file that is read, which is the limit of the format's own
/// library.
inline constexpr Bytes kLongestHeader = 100'000'000;
/// Size of the header's length field.
inline constexpr Bytes kLengthBytes = 8;

struct HeaderText {
  std::uint64_t length = 0;         ///< length in the file
  std::optional<std::string> json;  ///< empty if the file, or kLongestHeader, is shorter
};

/// The header of an open safetensors file of `size` bytes. Throws Error(data) if the file has no
/// length field, Error(io).
HeaderText read_header_text(const Descriptor& file, const std::filesystem::path& path, Bytes size);

/// The name that tensor `name` has in a folder of the text model alone. Models of text and images
/// (or audio) store it with "language_model." or "text_model." in addition. Returns other names
/// unchanged.
std::string name_in_text_model(const std::string& name);

/// The names of the tensors in the safetensors files at `weights` (a file, an index, or a folder
/// with one of them), each by name_in_text_model(), from the index or the header alone. Empty if
/// they cannot be read: the reader of the weights then reports why. Never throws.
std::optional<std::set<std::string>> stored_names(const std::filesystem::path& weights);

/// Whether some of these tensors are codes of quantised matrices, or their scales.
bool are_quantized(const std::set<std::string>& names);

/// Whether the matrix `name` is stored in NF4 (bitsandbytes). The names may lack the first part of
/// `name`, as in files of a model without its head.
bool is_nf4(const std::set<std::string>& names, const std::string& name);

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

/// Section of config.json that describes quantised weights.
inline constexpr const char* kQuantization = "quantization_config";

/// Checks the keys of config.json `file` that the model section of `family` does not use. Appends
/// notes to `notes`: one for each kind of dropout, and one for all keys that the family's class of
/// transformers does not read. Throws Error(config) that names all other unknown keys, since they
/// may change what the model computes. For a family whose class transformers does not have, these
/// are all unknown keys except those that are null or false.
void check_unknown_keys(const text::Json& json, const model::Family& family,
                        const std::string& file, std::vector<std::string>& notes);

/// A config.json of Hugging Face in which the keys of rotary positions have the form of the model
/// section of `family`: rope_theta, rope_scaling (null: not scaled) and, for families that have
/// them, partial_rotary_factor and rope_local_base_freq. Each has the value that the family's class
/// of transformers 5 uses: rope_scaling overrides rope_parameters, values in them override those of
/// the config itself, and missing values are the class's defaults. Appends to `notes` which keys
/// have no effect. Throws Error(config) naming `file` and the key for settings that the class does
/// not compute.
text::Json with_rope_keys(text::Json json, const model::Family& family, const std::string& file,
                          std::vector<std::string>& notes);

/// Adds the keys of rotary positions that transformers' class of the family reads under other
/// names. `out` is a config.json that already has the keys of the model section.
void add_rope_keys(text::Json& out, const model::Family& family);

/// Moves keys of rope_scaling that the section has, too, to the section. The values of rope_scaling
/// apply; earlier versions wrote them there.
text::Json with_separate_rope_keys(text::Json section);

/// Whether a config.json has a key of rotary positions.
bool has_rope_keys(const text::Json& json);

}  // namespace ballast::config
