#include "src/model/spec/families/llama.h"

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

}  // namespace ballast::model
