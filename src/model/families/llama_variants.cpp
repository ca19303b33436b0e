#include "src/model/families/llama_variants.h"

#include <fmt/format.h>

namespace ballast::model {

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

DecoderSpec SmolLm3::decoder(const ModelConfig& c, std::uint64_t index) const {
  DecoderSpec spec = Llama::decoder(c, index);
  const text::Json& layers = c.detail("no_rope_layers");
  spec.rotates =
      layers.is_array()
          ? *layers.elements()[index].whole() != 0
          : (index + 1) % static_cast<std::uint64_t>(c.number("no_rope_layer_interval")) != 0;
  return spec;
}

}  // namespace ballast::model
