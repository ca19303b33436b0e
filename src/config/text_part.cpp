#include "src/config/text_part.h"

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/core/suggest.h"
#include "ballast/text/words.h"

#include "src/config/json_values.h"
#include "src/config/stored_names.h"

namespace ballast::config {
namespace {

namespace fs = std::filesystem;
using text::Json;

constexpr const char* kModelType = "model_type";
constexpr const char* kText = "text_config";
constexpr const char* kTied = "tie_word_embeddings";
constexpr const char* kQuantized = "quantization_config";

/// Types of models that compute text alone exactly like the model of their text_config.
constexpr std::string_view kWrappers =
    "gemma3 gemma4 gemma4_unified idefics3 internvl kimi_k25 llava llava_next llava_onevision "
    "mistral3 qwen2_5_vl qwen2_audio qwen2_vl qwen3_vl smolvlm voxtral";
/// Types whose earlier folders have the keys of the text model outside text_config.
constexpr std::string_view kFlat = "qwen2_5_vl qwen2_vl";
/// Types whose class calls the text model text_model instead of language_model.
constexpr std::string_view kOfTextModel = "idefics3 smolvlm";
/// Keys of these folders that concern images.
constexpr std::string_view kOfImages =
    "image_token_id video_token_id vision_config vision_end_token_id vision_start_token_id "
    "vision_token_id";

/// A type of text_config that computes like a text model with another name. Rotary positions in
/// three axes (mrope) are ordinary ones for text, whose three positions are equal.
struct Equal {
  std::string_view type;
  std::string_view as;
};
constexpr std::array<Equal, 4> kEquals = {{{"gemma4_unified_text", "gemma4_text"},
                                           {"qwen2_5_vl_text", "qwen2"},
                                           {"qwen2_vl_text", "qwen2"},
                                           {"qwen3_vl_text", "qwen3"}}};

/// A default of transformers' class that differs from that of the text model alone.
struct Standard {
  std::string_view type;  ///< the model_type of text_config
  const char* key;
  double value;
};
constexpr std::array<Standard, 12> kStandards = {
    {{"gemma4_unified_text", "hidden_size_per_layer_input", 0},
     {"gemma4_unified_text", "max_position_embeddings", 262144},
     {"gemma4_unified_text", "sliding_window", 1024},
     {"gemma3_text", "vocab_size", 262208},
     {"gemma3_text", "num_attention_heads", 8},
     {"qwen2_vl_text", "rms_norm_eps", 1e-5},
     {"qwen2_vl_text", "num_key_value_heads", 8},
     {"qwen2_vl_text", "intermediate_size", 29568},
     {"qwen2_vl_text", "max_window_layers", 80},
     {"qwen2_vl_text", "rope_theta", 1e6},
     {"qwen3_vl_text", "max_position_embeddings", 128000},
     {"qwen3_vl_text", "rope_theta", 5e5}}};

void fill_in_standards(Json& json, std::string_view type) {
  if (type == "qwen2_5_vl_text") type = "qwen2_vl_text";  // has the same defaults
  for (const Standard& standard : kStandards) {
    if (standard.type != type || json.find(standard.key) != nullptr) continue;
    const bool whole = standard.value >= 1.0;
    json.add(standard.key,
             whole ? Json(static_cast<std::uint64_t>(standard.value)) : Json(standard.value));
  }
}

void drop_axes(Json& json) {
  for (const char* key : {"rope_parameters", "rope_scaling"}) {
    Json* const rope = json.find(key);
    if (rope == nullptr || !rope->is_object()) continue;
    rope->erase("mrope_section");
    rope->erase("mrope_interleaved");
    for (const char* type : {"type", "rope_type"}) {
      Json* const named = rope->find(type);
      if (named != nullptr && *named == "mrope") *named = Json("default");
    }
  }
}

/// Whether the embeddings are tied. Folders that do not say it have no output matrix if they are.
void fill_in_tying(Json& json, const Json& whole, const fs::path& file) {
  const Json* const given = find_given(whole, kTied);
  if (given != nullptr) {
    json[kTied] = Json(*given);
  } else if (find_given(json, kTied) == nullptr) {
    const auto names = stored_names(file.parent_path());
    if (names) json[kTied] = Json(!names->contains("lm_head.weight"));
  }
}

Json without_images(Json json) {
  for (const std::string_view key : text::words_of(kOfImages)) json.erase(key);
  return json;
}

}  // namespace

std::optional<TextPart> find_text_part(const Json& json, const fs::path& file) {
  const Json* const type = find_given(json, kModelType);
  if (type == nullptr || !type->is_string() || !text::has_word(kWrappers, type->text())) return {};
  const Json* const nested = find_given(json, kText);
  const bool flat = nested == nullptr && text::has_word(kFlat, type->text());
  if (!flat && (nested == nullptr || !nested->is_object())) return {};
  TextPart part = {
      flat ? without_images(json) : *nested, file.string(),
      text::has_word(kOfTextModel, type->text()) ? "model.text_model." : "model.language_model."};
  if (flat) {
    part.json[kModelType] = Json(type->text() + "_text");
  } else {
    part.label += fmt::format(", {}", kText);
  }
  const Json* const own = find_given(part.json, kModelType);
  if (own == nullptr || !own->is_string()) {
    throw Error(
        ErrorCategory::config,
        fmt::format("{}: has no {}, so the family is unknown; add it", part.label, kModelType));
  }
  const std::string given = own->text();
  fill_in_standards(part.json, given);
  const auto equal = std::ranges::find(kEquals, std::string_view(given), &Equal::type);
  if (equal != kEquals.end()) {
    drop_axes(part.json);
    part.json[kModelType] = Json(equal->as);
  }
  fill_in_tying(part.json, json, file);
  const Json* const quantized = json.find(kQuantized);
  if (!flat && quantized != nullptr) part.json[kQuantized] = Json(*quantized);
  return part;
}

std::string wrapper_types() {
  std::vector<std::string> types;
  for (const std::string_view type : text::words_of(kWrappers)) types.emplace_back(type);
  return listed(types);
}

}  // namespace ballast::config
