#include "src/model/spec/families/gemma.h"

#include <array>
#include <string_view>

namespace ballast::model {
namespace {

/// Refuses parts of Gemma 4 that Ballast does not compute.
void check_parts(const ModelConfig& c, const Refuse& refuse) {
  struct Part {
    const char* key;
    const char* what;
  };
  constexpr std::array<Part, 2> kNumbers = {
      {{"num_kv_shared_layers", "layers that share keys and values (E2B, E4B)"},
       {"hidden_size_per_layer_input", "embeddings per layer (E2B, E4B)"}}};
  for (const Part& part : kNumbers) {
    const text::Json& value = c.detail(part.key);
    if (value.is_number() && value.number() == 0.0) continue;
    refuse(part.key, fmt::format("must be 0, got {}: Ballast does not have {}", value.described(),
                                 part.what));
  }
}

void check_experts(const ModelConfig& c, const Refuse& refuse) {
  if (!c.flag("enable_moe_block")) return;
  constexpr std::uint64_t kMost = 4096;
  for (const char* const key : {"num_experts", "top_k_experts", "moe_intermediate_size"}) {
    const text::Json& value = c.detail(key);
    const bool counts = std::string_view(key) == "num_experts";
    if (value.whole().value_or(0) > 0 && (!counts || *value.whole() <= kMost)) continue;
    refuse(key,
           fmt::format("must be a number of at least 1{} with enable_moe_block, got {}",
                       counts ? fmt::format(" and at most {}", kMost) : "", value.described()));
  }
  if (*c.detail("top_k_experts").whole() > *c.detail("num_experts").whole()) {
    refuse("top_k_experts",
           fmt::format("{} is above num_experts ({})", c.detail("top_k_experts").described(),
                       c.detail("num_experts").described()));
  }
}

}  // namespace

void Gemma4::complete(ModelConfig& c, const Refuse& refuse) const {
  check_parts(c, refuse);
  check_experts(c, refuse);
  const std::uint64_t width = whole(c, "global_head_dim");
  if (width == 0 || width % 2 != 0) {
    refuse("global_head_dim", fmt::format("must be an even number of values, got {}",
                                          c.detail("global_head_dim").described()));
  }
  const text::Json& own = c.detail("num_global_key_value_heads");
  const std::uint64_t heads = own.is_null() ? c.num_kv_heads : own.whole().value_or(0);
  if (heads == 0 || c.num_heads % heads != 0) {
    refuse("num_global_key_value_heads",
           fmt::format("must divide num_heads ({}), got {}", c.num_heads, own.described()));
  }
  check_above_zero(c, "final_logit_softcapping", refuse, true);
  text::Json& scaling = c.details["rope_scaling"];
  if (scaling.is_null()) scaling = usual_scaling();
  Llama::complete(c, refuse);
}

}  // namespace ballast::model
