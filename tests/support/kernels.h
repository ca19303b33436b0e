#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "ballast/model/architecture.h"
#include "ballast/model/compute.h"

#include "src/model/compute/routing.h"

namespace ballast::test {

/// A tile of the output matrix, see Architecture::tile().
struct OutputTile {
  std::size_t number = 0;
  ConstDeviceBytes weights;  ///< flat weights of the tile's whole block
  /// Gradient sums: untied, the flat ones of the tile's block; tied, [rows of the tile, H]. Empty
  /// if not wanted.
  DeviceView<float> gradient = {};
};

/// Results of a router in addition to its rows; empty if not wanted.
struct RouterResults {
  DeviceView<std::int32_t> starts;
  DeviceView<double> totals;
  DeviceView<double> losses;
};

/// Values that a layer shares with others; empty if there are none.
struct SharedValues {
  DeviceBytes keys_values;
  DeviceBytes keys_values_gradient;
  DeviceBytes inputs;
  DeviceBytes inputs_gradient;
  DeviceBytes table_rows;
  // With experts that read the norm of attention, see the ports of these names.
  DeviceBytes residual;
  DeviceBytes normed_gradient;
  DeviceView<float> table_rows_gradient;
};

/// Calls the kernels of a model one by one, with a function per kernel that takes its arguments in
/// order. Compute::run() describes the arguments. `gradient`, `out`, `kept` and `positions` may be
/// empty.
class KernelCalls {
 public:
  using Stream = device::Stream;
  using Ids = DeviceView<const std::int32_t>;

  KernelCalls(const model::Architecture& model, model::Compute& compute)
      : model_(model), compute_(compute) {}

  void embedding_forward(Stream& stream, std::size_t block, ConstDeviceBytes weights, Ids tokens,
                         Ids positions, DeviceBytes out) {
    Call call(Kernel::embed, block);
    call.weights(weights).batch({tokens, {}, positions}).needs(Port::output, out);
    run(stream, call);
  }
  /// With tokens as sum rows, a gradient of the block's size has a row per token of the vocabulary.
  void embedding_backward(Stream& stream, std::size_t block, Ids tokens, Ids sum_rows,
                          Ids positions, ConstDeviceBytes dy, DeviceView<float> gradient) {
    Call call(Kernel::embed_backward, block);
    call.batch({tokens, {}, positions, {}, sum_rows}).needs(Port::activation_gradient, written(dy));
    call.gradient(gradient);
    run(stream, call);
  }

  void layer_forward(Stream& stream, std::size_t block, ConstDeviceBytes weights, Ids positions,
                     ConstDeviceBytes in, DeviceBytes out, DeviceBytes kept,
                     model::Dropout dropout = {}, model::Port port_of_kept = model::Port::kept,
                     const SharedValues& shared = {}) {
    Call call(Kernel::layer, block);
    call.weights(weights).positions(positions).needs(Port::input, written(in));
    call.needs(Port::output, out).takes(port_of_kept, kept).shares(shared);
    call.arguments.scalars.dropout = dropout;
    run(stream, call);
  }
  void layer_backward(Stream& stream, std::size_t block, ConstDeviceBytes weights, Ids positions,
                      ConstDeviceBytes in, DeviceBytes dy, DeviceView<float> gradient,
                      model::Accumulation accumulation, DeviceBytes kept,
                      model::Dropout dropout = {}, model::Port port_of_kept = model::Port::kept,
                      const SharedValues& shared = {}) {
    Call call(Kernel::layer_backward, block);
    call.weights(weights).positions(positions).needs(Port::input, written(in));
    call.needs(Port::activation_gradient, dy).gradient(gradient).takes(port_of_kept, kept);
    call.shares(shared).takes(Port::keys_values_gradient, shared.keys_values_gradient);
    call.takes(Port::layer_inputs_gradient, shared.inputs_gradient);
    call.takes(Port::table_rows_gradient, bytes(shared.table_rows_gradient));
    call.takes(Port::normed_gradient, shared.normed_gradient);
    call.arguments.scalars.accumulation = accumulation;
    call.arguments.scalars.dropout = dropout;
    run(stream, call);
  }

  void normalize(Stream& stream, std::size_t block, ConstDeviceBytes weights, ConstDeviceBytes in,
                 DeviceBytes rows, DeviceView<float> sums) {
    Call call(Kernel::norm, block);
    call.weights(weights).needs(Port::input, written(in)).needs(Port::normed, rows);
    call.takes(Port::partial_sums, bytes(sums));
    run(stream, call);
  }
  /// Also used for a shared expert, which is such a tile.
  void tile_forward(Stream& stream, std::size_t block, ConstDeviceBytes weights, Ids positions,
                    DeviceBytes rows, DeviceView<float> sums, DeviceBytes out) {
    Call call(is_shared(block) ? Kernel::shared_expert : Kernel::tile, block);
    call.weights(weights).positions(positions).needs(Port::normed, rows);
    call.needs(Port::partial_sums, bytes(sums)).takes(Port::output, out);
    run(stream, call);
  }
  void tile_backward(Stream& stream, std::size_t block, ConstDeviceBytes weights, Ids positions,
                     DeviceBytes rows, ConstDeviceBytes dy, DeviceView<float> sums,
                     DeviceView<float> gradient, model::Accumulation accumulation) {
    Call call(is_shared(block) ? Kernel::shared_expert_backward : Kernel::tile_backward, block);
    call.weights(weights).positions(positions).needs(Port::normed, rows);
    call.needs(Port::activation_gradient, written(dy)).needs(Port::partial_sums, bytes(sums));
    call.gradient(gradient);
    call.arguments.scalars.accumulation = accumulation;
    run(stream, call);
  }
  void norm_backward(Stream& stream, std::size_t block, ConstDeviceBytes weights,
                     ConstDeviceBytes in, DeviceView<float> sums, DeviceBytes dy,
                     DeviceView<float> gradient) {
    Call call(Kernel::norm_backward, block);
    call.weights(weights).needs(Port::input, written(in)).needs(Port::partial_sums, bytes(sums));
    call.needs(Port::activation_gradient, dy).gradient(gradient);
    run(stream, call);
  }

  void route(Stream& stream, std::size_t block, ConstDeviceBytes weights, ConstDeviceBytes in,
             Ids targets, DeviceBytes rows, DeviceView<float> sums, const RouterResults& results,
             DeviceBytes residual = {}) {
    Call call(Kernel::router, block);
    call.weights(weights).needs(Port::input, written(in)).needs(Port::normed, rows);
    if (!targets.empty()) call.batch({{}, targets, {}});
    call.takes(Port::partial_sums, bytes(sums)).takes(Port::routing, bytes(results.starts));
    call.takes(Port::router_totals, bytes(results.totals));
    call.takes(Port::losses, bytes(results.losses)).takes(Port::residual, residual);
    run(stream, call);
  }
  void router_backward(Stream& stream, std::size_t block, ConstDeviceBytes weights,
                       ConstDeviceBytes in, DeviceBytes rows, DeviceView<float> sums,
                       DeviceView<double> totals, float scale, DeviceBytes dy,
                       DeviceView<float> gradient, model::Accumulation accumulation,
                       DeviceBytes dnormed = {}) {
    Call call(Kernel::router_backward, block);
    call.weights(weights).needs(Port::input, written(in)).needs(Port::normed, rows);
    call.needs(Port::partial_sums, bytes(sums)).takes(Port::router_totals, bytes(totals));
    call.needs(Port::activation_gradient, dy).gradient(gradient);
    call.takes(Port::normed_gradient, dnormed);
    call.arguments.scalars.router_gradient = scale;
    call.arguments.scalars.accumulation = accumulation;
    run(stream, call);
  }
  /// `starts` [experts + 1] is in host memory, as the router has written it.
  void expert_forward(Stream& stream, std::size_t block, ConstDeviceBytes weights, DeviceBytes rows,
                      std::span<const std::int32_t> starts, DeviceView<float> sums,
                      DeviceBytes out) {
    Call call(Kernel::expert, block);
    call.weights(weights).needs(Port::normed, rows).counts(starts);
    call.needs(Port::partial_sums, bytes(sums)).takes(Port::output, out);
    run(stream, call);
  }
  void expert_backward(Stream& stream, std::size_t block, ConstDeviceBytes weights,
                       DeviceBytes rows, std::span<const std::int32_t> starts, ConstDeviceBytes dy,
                       DeviceView<float> sums, DeviceView<float> gradient) {
    Call call(Kernel::expert_backward, block);
    call.weights(weights).needs(Port::normed, rows).counts(starts);
    call.needs(Port::activation_gradient, written(dy)).needs(Port::partial_sums, bytes(sums));
    call.gradient(gradient);
    run(stream, call);
  }

  void result_norm(Stream& stream, std::size_t block, ConstDeviceBytes weights, ConstDeviceBytes in,
                   ConstDeviceBytes residual, DeviceBytes out) {
    Call call(Kernel::result_norm, block);
    call.weights(weights).needs(Port::input, written(in)).needs(Port::residual, written(residual));
    call.needs(Port::output, out);
    run(stream, call);
  }
  void result_norm_backward(Stream& stream, std::size_t block, ConstDeviceBytes weights,
                            ConstDeviceBytes in, ConstDeviceBytes dy, DeviceBytes dx,
                            DeviceView<float> gradient) {
    Call call(Kernel::result_norm_backward, block);
    call.weights(weights).needs(Port::input, written(in)).gradient(gradient);
    call.needs(Port::activation_gradient, written(dy)).needs(Port::result_gradient, dx);
    run(stream, call);
  }

  /// `output`: the flat weights of the block with the output matrix.
  void head_forward(Stream& stream, ConstDeviceBytes weights, ConstDeviceBytes output,
                    ConstDeviceBytes in, Ids targets, DeviceView<double> losses) {
    Call call(Kernel::head_evaluate, model_.head());
    call.weights(weights).needs(Port::input, written(in)).batch({{}, targets, {}});
    call.needs(Port::losses, bytes(losses));
    if (model_.config.tie_embeddings) call.output_weights(output);
    run(stream, call);
  }
  void head_train(Stream& stream, ConstDeviceBytes weights, std::span<const OutputTile> tiles,
                  ConstDeviceBytes in, Ids targets, float gradient_scale, DeviceBytes dx,
                  DeviceView<float> gradient, model::Accumulation accumulation,
                  DeviceView<double> losses, DeviceBytes kept = {}) {
    Call call(Kernel::head_train, model_.head());
    call.weights(weights).needs(Port::input, written(in)).batch({{}, targets, {}});
    call.needs(Port::activation_gradient, dx).gradient(gradient);
    call.needs(Port::losses, bytes(losses)).needs(Port::kept, kept);
    const bool in_head = !model_.config.tie_embeddings && tiles.size() == 1;
    for (const OutputTile& tile : tiles.subspan(in_head ? 1 : 0)) {
      call.output_weights(tile.weights).output_gradient(tile.gradient);
    }
    call.arguments.scalars.accumulation = accumulation;
    call.arguments.scalars.loss_gradient = gradient_scale;
    run(stream, call);
  }
  void head_scan(Stream& stream, const OutputTile& tile, Ids targets, DeviceBytes rows) {
    Call call(Kernel::head_scan, tile, model_);
    call.batch({{}, targets, {}}).needs(Port::normed, rows);
    run(stream, call);
  }
  void head_differentiate(Stream& stream, const OutputTile& tile, Ids targets, float gradient_scale,
                          DeviceBytes rows, DeviceView<float> dnormed,
                          model::Accumulation accumulation) {
    Call call(Kernel::head_differentiate, tile, model_);
    call.batch({{}, targets, {}}).needs(Port::normed, rows);
    call.takes(Port::partial_sums, bytes(dnormed));
    if (!tile.gradient.empty() && model_.config.tie_embeddings) call.output_gradient(tile.gradient);
    if (!model_.config.tie_embeddings) call.gradient(tile.gradient);
    call.arguments.scalars.accumulation = accumulation;
    call.arguments.scalars.loss_gradient = gradient_scale;
    run(stream, call);
  }
  void head_end(Stream& stream, ConstDeviceBytes weights, ConstDeviceBytes in, Ids targets,
                DeviceBytes rows, DeviceView<float> dnormed, DeviceBytes dx,
                DeviceView<float> gradient, DeviceView<double> loss_sum) {
    Call call(Kernel::head_end, model_.head());
    call.weights(weights).needs(Port::input, written(in)).batch({{}, targets, {}});
    call.needs(Port::normed, rows).takes(Port::partial_sums, bytes(dnormed));
    call.takes(Port::activation_gradient, dx).gradient(gradient);
    call.takes(Port::losses, bytes(loss_sum));
    run(stream, call);
  }

 private:
  using Kernel = model::Kernel;
  using Port = model::Port;

  /// A pass and the arguments collected so far.
  struct Call {
    Call(Kernel kernel, std::size_t block)
        : pass{.kernel = kernel, .block = static_cast<model::BlockId>(block)} {}
    /// A pass on one tile of the vocabulary.
    Call(Kernel kernel, const OutputTile& tile, const model::Architecture& model)
        : Call(kernel, model.tile(tile.number).block) {
      pass.number = static_cast<std::uint32_t>(tile.number);
      weights(tile.weights);
    }

    Call& binds(Port port, bool optional) {
      pass.operands.push_back({.port = port, .optional = optional});
      return *this;
    }
    Call& needs(Port port, DeviceBytes view) {
      arguments[port] = view;
      return binds(port, false);
    }
    Call& takes(Port port, DeviceBytes view) {
      arguments[port] = view;
      return binds(port, true);
    }
    Call& weights(ConstDeviceBytes view) { return needs(Port::weights, written(view)); }
    Call& gradient(DeviceView<float> sums) { return takes(Port::gradient, bytes(sums)); }
    Call& batch(const model::BatchViews& views) {
      arguments.batch = views;
      return binds(Port::batch, false);
    }
    Call& positions(Ids ids) {
      arguments.batch.positions = ids;
      return binds(Port::batch, true);
    }
    Call& shares(const SharedValues& values) {
      takes(Port::keys_values, values.keys_values).takes(Port::layer_inputs, values.inputs);
      return takes(Port::table_rows, values.table_rows).takes(Port::residual, values.residual);
    }
    Call& counts(std::span<const std::int32_t> starts) {
      arguments.routing_counts = starts;
      return binds(Port::routing_counts, false);
    }
    Call& output_weights(ConstDeviceBytes view) {
      arguments.output_weights.push_back(written(view));
      return binds(Port::output_weights, false);
    }
    Call& output_gradient(DeviceView<float> sums) {
      arguments.output_gradient.push_back(bytes(sums));
      return binds(Port::output_gradient, true);
    }

    model::Pass pass;
    model::PassArguments arguments;
  };

  template <class T>
  static DeviceBytes bytes(DeviceView<T> view) {
    return {reinterpret_cast<std::byte*>(view.raw()), view.size() * sizeof(T)};
  }
  /// Casts away const, since arguments do not distinguish what a kernel only reads.
  static DeviceBytes written(ConstDeviceBytes view) {
    return {const_cast<std::byte*>(view.raw()), view.size()};
  }
  [[nodiscard]] bool is_shared(std::size_t block) const {
    return model_.blocks[block].content == model::BlockContent::shared_expert;
  }
  void run(Stream& stream, const Call& call) { compute_.run(stream, call.pass, call.arguments); }

  const model::Architecture& model_;
  model::Compute& compute_;
};

}  // namespace ballast::test
