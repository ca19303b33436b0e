#pragma once

#include <cstddef>
#include <vector>

#include "ballast/core/memory.h"
#include "ballast/model/architecture.h"
#include "ballast/model/compute.h"
#include "ballast/model/kernels.h"

#include "src/model/compute/layer_arguments.h"
#include "src/model/compute/output_head.h"
#include "src/model/compute/routing.h"

namespace ballast::model {

template <class U>
U* as(DeviceBytes bytes) {
  return view_as<U>(bytes).raw();
}
template <class U>
const U* as(ConstDeviceBytes bytes) {
  return view_as<U>(bytes).raw();
}

inline RoutingCounts counts_of(const PassArguments& args) {
  return {args.routing_counts, args.scalars.ranks};
}

/// Returns the weights of a pass, and the gradients that it adds to.
template <class T>
BlockWeights<T> weights_of(const PassArguments& args) {
  return {.weights = as<T>(args[Port::weights]), .gradient = view_as<float>(args[Port::gradient])};
}

/// Returns the number of partial statistics of `values` packed values.
inline std::size_t chunks_of(std::size_t values) {
  return (values + kStatsChunk - 1) / kStatsChunk;
}

inline ModelRole role_of(const Pass& pass) {
  return pass.reference > 0 ? ModelRole::reference : ModelRole::policy;
}

/// Like weights_of(args), for the model that the pass computes.
template <class T>
BlockWeights<T> weights_of(const Pass& pass, const PassArguments& args) {
  BlockWeights<T> weights = weights_of<T>(args);
  weights.role = role_of(pass);
  return weights;
}

inline KeptValues kept_of(const PassArguments& args) {
  return {args[Port::kept].raw(), args[Port::kept_attention].raw()};
}

/// Converts the arguments of a pass into the structs of the kernels.
template <class T>
class PassViews {
 public:
  PassViews(const Architecture& model, const MicroBatchShape& shape)
      : model_(model), shape_(shape) {}

  /// Like weights_of(), for a layer.
  [[nodiscard]] BlockWeights<T> weights_of_layer(const Pass& pass,
                                                 const PassArguments& args) const {
    return {pass.block - model_.first_layer(), as<T>(args[Port::weights]),
            view_as<float>(args[Port::gradient]), args.scalars.accumulation};
  }
  /// Returns the sequences of the micro-batch for a layer.
  [[nodiscard]] LayerSequences sequences_of(const PassArguments& args) const {
    const BatchViews& batch = args.batch;
    const auto& documents = shape_.slices > 1 ? batch.whole_positions : batch.positions;
    return {batch.positions.raw(), documents.raw(), args.sequence_slice};
  }
  /// Returns what the layer of the pass shares with others.
  [[nodiscard]] LayerLinks<T> links_of(const PassArguments& args) const {
    return {.keys_values = as<T>(args[Port::keys_values]),
            .keys_values_gradient = as<float>(args[Port::keys_values_gradient]),
            .inputs = as<T>(args[Port::layer_inputs]),
            .inputs_gradient = as<T>(args[Port::layer_inputs_gradient]),
            .table_rows = as<T>(args[Port::table_rows]),
            .table_rows_gradient = as<float>(args[Port::table_rows_gradient]),
            .normed = args[Port::residual].empty() ? nullptr : as<T>(args[Port::output]),
            .normed_gradient = as<T>(args[Port::normed_gradient])};
  }
  /// Returns the tile of the pass.
  [[nodiscard]] OutputRows<T> output_tile(const Pass& pass, const PassArguments& args) const {
    const DeviceBytes gradient =
        args.output_gradient.empty() ? args[Port::gradient] : args.output_gradient.front();
    return output_rows(pass.number, as<T>(args[Port::weights]), as<float>(gradient));
  }
  /// Returns all tiles. One tile that is not tied is in the block of the norm; others have their
  /// own blocks.
  [[nodiscard]] std::vector<OutputRows<T>> output_tiles(const PassArguments& args) const {
    const bool whole = !model_.config.tie_embeddings && model_.config.vocabulary_tiles == 1;
    const std::size_t own = whole ? 1 : 0;
    std::vector<OutputRows<T>> tiles;
    if (own > 0) {
      tiles.push_back(output_rows(0, as<T>(args[Port::weights]), as<float>(args[Port::gradient])));
    }
    for (std::size_t i = 0; i < args.output_weights.size(); ++i) {
      const bool trained = i < args.output_gradient.size();
      tiles.push_back(output_rows(own + i, as<T>(args.output_weights[i]),
                                  trained ? as<float>(args.output_gradient[i]) : nullptr));
    }
    return tiles;
  }
  [[nodiscard]] Pairs pairs_of(const PassArguments& args) const {
    const DeviceBytes all = args[Port::pairs];
    const Bytes reference = shape_.sequences * sizeof(double);
    return {args.scalars.preference, view_as<double>(all.subview(0, reference)),
            view_as<float>(all.subview(reference, shape_.tokens() * sizeof(float)))};
  }
  /// Returns the outputs of a pass of the head. A reference model writes its losses for the trained
  /// model.
  [[nodiscard]] HeadLosses losses_of(const Pass& pass, const PassArguments& args) const {
    const auto out = view_as<double>(args[Port::losses]);
    if (args[Port::pairs].empty()) return {out};
    const Pairs pairs = pairs_of(args);
    if (pass.reference > 0) return {pairs.reference};
    return {out, pairs};
  }

 private:
  /// Returns tile `number` of the output matrix in the flat weights of its block. `gradient`: the
  /// sums of that block or, if the matrix is tied, [rows of the tile, H]; null: not wanted.
  [[nodiscard]] OutputRows<T> output_rows(std::size_t number, const T* weights,
                                          float* gradient) const {
    const bool tied = model_.config.tie_embeddings;
    const BlockSpec& block = model_.blocks[model_.tile(number).block];
    const TensorSpec& matrix = block.tensor(tied ? model_.outer.tokens : model_.outer.output);
    if (matrix.frozen) gradient = nullptr;
    return {number, weights + matrix.offset,
            gradient == nullptr || tied ? gradient : gradient + matrix.offset};
  }

  const Architecture& model_;
  const MicroBatchShape& shape_;
};

}  // namespace ballast::model
