#include <cstdint>
#include <memory>
#include <string_view>
#include <variant>
#include <vector>

#include "ballast/core/dtype.h"
#include "ballast/core/error.h"

#include "src/model/compute/attention_part.h"
#include "src/model/compute/convolution_part.h"
#include "src/model/compute/delta_part.h"
#include "src/model/compute/layer_embedding_part.h"
#include "src/model/compute/mlp_part.h"
#include "src/model/compute/mlp_with_experts_part.h"
#include "src/model/compute/part.h"

namespace ballast::model {

LinearAt Binder::map(const MapSpec& spec, std::size_t in, std::size_t out) const {
  if (block_ == nullptr) return {.in = in, .out = out, .flipped = !input_first_};
  return input_first_ ? find_conv1d(*block_, spec.name) : find_linear(*block_, spec.name);
}

std::vector<LinearAt> Binder::ranges(const MapSpec& spec, std::size_t in, std::size_t out) const {
  const LinearAt all = map(spec, in, out);
  if (block_ == nullptr) return {all};
  return find_ranges(*block_, spec.name, all);
}

NormAt Binder::norm(const NormSpec& spec) const {
  NormAt at = {.offset = spec.offset,
               .epsilon = static_cast<float>(spec.epsilon),
               .centred = spec.layer_norm,
               .plain = spec.name.empty()};
  return block_ == nullptr || at.plain ? at : find_norm(*block_, spec);
}

Elems Binder::offset(std::string_view name) const {
  return block_ == nullptr ? 0 : block_->tensor(name).offset;
}

bool Binder::is_tile() const {
  return block_ != nullptr && block_->content == BlockContent::attention;
}

template <class T>
std::unique_ptr<LayerPart<T>> make_part(const BodySpec& body, std::uint64_t layer,
                                        const KeySharing& sharing, const Binder& binder,
                                        LayerTools<T>& tools) {
  if (const auto* const attention = std::get_if<AttentionSpec>(&body)) {
    return std::make_unique<AttentionPart<T>>(*attention, sharing, binder, tools);
  }
  if (const auto* const delta = std::get_if<DeltaSpec>(&body)) {
    return std::make_unique<DeltaPart<T>>(*delta, binder, tools);
  }
  if (const auto* const convolution = std::get_if<ConvolutionSpec>(&body)) {
    return std::make_unique<ConvolutionPart<T>>(*convolution, binder, tools);
  }
  if (const auto* const mlp = std::get_if<MlpSpec>(&body)) {
    return std::make_unique<MlpPart<T>>(*mlp, binder, tools);
  }
  if (const auto* const both = std::get_if<MlpWithExpertsSpec>(&body)) {
    return std::make_unique<MlpWithExpertsPart<T>>(*both, binder, tools);
  }
  const auto* const embedding = std::get_if<LayerEmbeddingSpec>(&body);
  expects(embedding != nullptr, "experts have their own passes");
  return std::make_unique<LayerEmbeddingPart<T>>(*embedding, layer, binder, tools);
}

template std::unique_ptr<LayerPart<float>> make_part(const BodySpec&, std::uint64_t,
                                                     const KeySharing&, const Binder&,
                                                     LayerTools<float>&);
template std::unique_ptr<LayerPart<Bf16>> make_part(const BodySpec&, std::uint64_t,
                                                    const KeySharing&, const Binder&,
                                                    LayerTools<Bf16>&);
template std::unique_ptr<LayerPart<F16>> make_part(const BodySpec&, std::uint64_t,
                                                   const KeySharing&, const Binder&,
                                                   LayerTools<F16>&);

}  // namespace ballast::model
