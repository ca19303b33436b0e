#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/model/family.h"

#include "src/model/compute/decoder_layer.h"
#include "src/model/compute/layer.h"
#include "src/model/spec/families/experts.h"
#include "src/model/spec/families/gemma3.h"
#include "src/model/spec/families/gpt2.h"
#include "src/model/spec/families/gpt_neox.h"
#include "src/model/spec/families/llama_variants.h"

namespace ballast::model {

template <class Ops>
using MakeLayer = std::unique_ptr<Layer<Ops>> (*)(const Architecture&, const AttentionShape&, Ops&);

template <class Ops>
using LayerMakers = std::map<std::string, MakeLayer<Ops>, std::less<>>;

template <class F, class Ops>
std::unique_ptr<Layer<Ops>> make_layer_of(const Architecture& model, const AttentionShape& shape,
                                          Ops& ops) {
  return std::make_unique<typename F::template LayerOf<Ops>>(model, shape, ops);
}

template <class... F>
struct FamilyList {
  static std::vector<std::unique_ptr<const Family>> families() {
    std::vector<std::unique_ptr<const Family>> made;
    (made.push_back(std::make_unique<const F>()), ...);
    return made;
  }
  template <class Ops>
  static LayerMakers<Ops> layers() {
    return {{std::string(F().name()), &make_layer_of<F, Ops>}...};
  }
};

/// The built-in families, the default first.
using BuiltInFamilies = FamilyList<Gpt2, Llama, Mistral, Qwen2, Qwen3, SmolLm3, Phi3, Olmo2, Gemma3,
                                   GptNeoX, Mixtral, Qwen2Moe, Qwen3Moe, Olmoe, GptOss>;

/// Layers for the operations of one device, by the name of the family.
template <class Ops>
LayerMakers<Ops>& layer_makers() {
  static LayerMakers<Ops> makers = BuiltInFamilies::layers<Ops>();
  return makers;
}

/// Registers another family with its layer for the operations `Ops`. Call it before other threads
/// use models.
template <class F, class... Ops>
void register_family() {
  add_family(std::make_unique<const F>());
  (layer_makers<Ops>().emplace(F().name(), &make_layer_of<F, Ops>), ...);
}

/// Throws Error(config) if the family has no layer for these operations.
template <class Ops>
std::unique_ptr<Layer<Ops>> make_layer(const Architecture& model, const AttentionShape& shape,
                                       Ops& ops) {
  const auto found = layer_makers<Ops>().find(model.config.family);
  if (found == layer_makers<Ops>().end()) {
    throw Error(
        ErrorCategory::config,
        fmt::format("model.family: '{}' has no kernels for this device", model.config.family));
  }
  return found->second(model, shape, ops);
}

}  // namespace ballast::model
