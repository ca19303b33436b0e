#include <algorithm>
#include <array>
#include <span>
#include <string_view>

#include "ballast/model/family.h"

namespace ballast::model {
namespace {

struct Equal {
  std::string_view type;
  std::string_view as;
};
/// Rotary positions in three axes (mrope) are ordinary ones for text, whose three positions are
/// equal.
constexpr std::array<Equal, 4> kEquals = {{{"gemma4_unified_text", "gemma4_text"},
                                           {"qwen2_5_vl_text", "qwen2"},
                                           {"qwen2_vl_text", "qwen2"},
                                           {"qwen3_vl_text", "qwen3"}}};

constexpr std::string_view kUnified = "gemma4_unified_text";
constexpr std::string_view kQwen2 = "qwen2_vl_text qwen2_5_vl_text";
constexpr std::string_view kQwen3 = "qwen3_vl_text";
/// Defaults that are not those of the text model alone.
constexpr std::array<TextModelStandard, 12> kStandards = {
    {{kUnified, "hidden_size_per_layer_input", 0},
     {kUnified, "max_position_embeddings", 262144},
     {kUnified, "sliding_window", 1024},
     {"gemma3_text", "vocab_size", 262208},
     {"gemma3_text", "num_attention_heads", 8},
     {kQwen2, "rms_norm_eps", 1e-5},
     {kQwen2, "num_key_value_heads", 8},
     {kQwen2, "intermediate_size", 29568},
     {kQwen2, "max_window_layers", 80},
     {kQwen2, "rope_theta", 1e6},
     {kQwen3, "max_position_embeddings", 128000},
     {kQwen3, "rope_theta", 5e5}}};

}  // namespace

TextWrappers text_wrappers() {
  return {.all =
              "gemma3 gemma4 gemma4_unified idefics3 internvl kimi_k25 llava llava_next "
              "llava_onevision minimax_m3_vl mistral3 muse_glimmer qwen2_5_vl qwen2_audio qwen2_vl "
              "qwen3_5 "
              "qwen3_5_moe qwen3_vl smolvlm voxtral",
          .flat = "qwen2_5_vl qwen2_vl",
          .with_text_model = "idefics3 smolvlm"};
}

std::string_view equal_text_model(std::string_view type) {
  const auto* const found = std::ranges::find(kEquals, type, &Equal::type);
  return found == kEquals.end() ? std::string_view() : found->as;
}

std::span<const TextModelStandard> standards_of_text_models() {
  return kStandards;
}

}  // namespace ballast::model
