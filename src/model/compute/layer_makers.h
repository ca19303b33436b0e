#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <type_traits>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/model/family.h"

#include "src/model/compute/decoder_tiles.h"
#include "src/model/compute/layer.h"
#include "src/model/spec/families/decoder.h"

namespace ballast::model {

// Makers of the families' layers. A DecoderFamily has DecoderLayers; every other family has a
// template F::LayerOf<Ops>.

template <class Ops>
using MakeLayer = std::unique_ptr<Layer<Ops>> (*)(const Architecture&, const AttentionShape&, Ops&);

template <class L, class Ops>
std::unique_ptr<Layer<Ops>> make_layer_of(const Architecture& model, const AttentionShape& shape,
                                          Ops& ops) {
  return std::make_unique<L>(model, shape, ops);
}

/// Makers of layers that are not DecoderLayers, by family name.
template <class Ops>
std::map<std::string, MakeLayer<Ops>, std::less<>>& own_layer_makers() {
  static std::map<std::string, MakeLayer<Ops>, std::less<>> makers;
  return makers;
}

/// Registers a family and its layer for the operations `Ops`. Call it before other threads use
/// models.
template <class F, class... Ops>
void register_family() {
  add_family(std::make_unique<const F>());
  if constexpr (!std::is_base_of_v<DecoderFamily, F>) {
    (own_layer_makers<Ops>().emplace(F().name(),
                                     &make_layer_of<typename F::template LayerOf<Ops>, Ops>),
     ...);
  }
}

/// Makes the layers of the model's family. Throws Error(config) if there are none for these
/// operations.
template <class Ops>
std::unique_ptr<Layer<Ops>> make_layer(const Architecture& model, const AttentionShape& shape,
                                       Ops& ops) {
  const std::string& name = model.config.family;
  if (dynamic_cast<const DecoderFamily*>(&family(name)) != nullptr) {
    return make_layer_of<DecoderLayer<Ops>>(model, shape, ops);
  }
  const auto found = own_layer_makers<Ops>().find(name);
  if (found == own_layer_makers<Ops>().end()) {
    throw Error(ErrorCategory::config,
                fmt::format("model.family: '{}' has no kernels for this device", name));
  }
  return found->second(model, shape, ops);
}

}  // namespace ballast::model
