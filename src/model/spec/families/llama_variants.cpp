#include "src/model/spec/families/llama_variants.h"

#include <string_view>

#include <fmt/format.h>

namespace ballast::model {
namespace {

/// Returns the detail with this name, or nullptr if the family lacks it or it is null.
const text::Json* given_detail(const ModelConfig& c, std::string_view name) {
  const auto found = c.details.find(name);
  return found == c.details.end() || found->second.is_null() ? nullptr : &found->second;
}

}  // namespace

bool Llama::is_sliding(const ModelConfig& c, std::uint64_t index) const {
  const text::Json* const types = given_detail(c, "layer_types");
  return types == nullptr ? is_windowed(c, index) : types->elements()[index] == "sliding_attention";
}

std::uint64_t Llama::window(const ModelConfig& c, std::uint64_t index) const {
  const text::Json* const tokens = given_detail(c, "sliding_window");
  const text::Json* const used = given_detail(c, "use_sliding_window");
  if (tokens == nullptr || (used != nullptr && !used->flag())) return 0;
  return is_sliding(c, index) ? *tokens->whole() : 0;
}

void Llama::check_windows(const ModelConfig& c, const Refuse& refuse) {
  const text::Json* const tokens = given_detail(c, "sliding_window");
  const text::Json* const used = given_detail(c, "use_sliding_window");
  const bool unused = used != nullptr && !used->flag();  // transformers then writes 0
  if (tokens != nullptr && (!tokens->whole() || (*tokens->whole() == 0 && !unused))) {
    refuse("sliding_window",
           fmt::format("must be a number of tokens, got {}", tokens->described()));
  }
  const text::Json* const types = given_detail(c, "layer_types");
  if (types == nullptr) return;
  bool known = types->is_array() && types->elements().size() == c.num_layers;
  for (const text::Json& type : types->elements()) {
    known = known && (type == "sliding_attention" || type == "full_attention");
  }
  if (known) return;
  refuse("layer_types",
         fmt::format("must be a list of num_layers ({}) words, \"full_attention\" or "
                     "\"sliding_attention\"",
                     c.num_layers));
}

void SmolLm3::complete(ModelConfig& c, const Refuse& refuse) const {
  Llama::complete(c, refuse);
  const text::Json& layers = c.detail("no_rope_layers");
  if (layers.is_null()) {
    const double interval = c.number("no_rope_layer_interval");
    if (interval < 1.0) {
      refuse("no_rope_layer_interval", fmt::format("must be at least 1, got {}", interval));
    }
    return;
  }
  bool flags = layers.is_array() && layers.elements().size() == c.num_layers;
  for (const text::Json& one : layers.elements()) flags = flags && one.whole() && *one.whole() <= 1;
  if (!flags) {
    refuse("no_rope_layers",
           fmt::format("must be a list of num_layers ({}) numbers: 1 for a layer with rotary "
                       "positions, 0 for one without",
                       c.num_layers));
  }
}

bool SmolLm3::rotates(const ModelConfig& c, std::uint64_t index) {
  const text::Json& layers = c.detail("no_rope_layers");
  if (layers.is_array()) return *layers.elements()[index].whole() != 0;
  return (index + 1) % static_cast<std::uint64_t>(c.number("no_rope_layer_interval")) != 0;
}

DecoderSpec SmolLm3::decoder(const ModelConfig& c, std::uint64_t index) const {
  DecoderSpec spec = Llama::decoder(c, index);
  spec.rotates = rotates(c, index);
  return spec;
}

}  // namespace ballast::model
