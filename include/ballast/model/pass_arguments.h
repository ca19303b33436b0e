#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "ballast/core/units.h"
#include "ballast/core/view.h"
#include "ballast/device/device.h"
#include "ballast/model/preference.h"
#include "ballast/model/step_program.h"

namespace ballast::model {

/// Position of a backward pass among the micro-batches of a step.
enum class Accumulation : std::uint8_t {
  first,  ///< the first after Compute::clear_gradient(): overwrites the gradients of matrices
  later   ///< adds to all gradients
};

/// Selects the elements that a layer with AdapterConfig::dropout drops. They are the same in the
/// forward and backward pass of a micro-batch, and differ between micro-batches.
struct Dropout {
  bool on = false;        ///< false in evaluations and in reference models
  std::uint64_t key = 0;  ///< derived from the seed, the step and the micro-batch
};

/// Moves rows between the ranks that share the experts of a block (comm::Communicator::all_to_all).
class RowExchange {
 public:
  virtual ~RowExchange() = default;
  RowExchange() = default;
  RowExchange(const RowExchange&) = delete;
  RowExchange& operator=(const RowExchange&) = delete;

  /// Enqueues an all-to-all on `stream`: sends part p of `input` to the rank with expert p of a
  /// block and receives part p of `output` from it. Sizes of the parts are in bytes.
  virtual void exchange(device::Stream& stream, ConstDeviceBytes input,
                        std::span<const Bytes> input_parts, DeviceBytes output,
                        std::span<const Bytes> output_parts) = 0;
};

/// Port::batch in its parts, each [N] or empty.
struct BatchViews {
  DeviceView<const std::int32_t> tokens;   ///< in [0, V)
  DeviceView<const std::int32_t> targets;  ///< below V; rows with a negative target have no loss
  /// Position of each token in its document: 0, or one more than the preceding token's. Attention
  /// stays inside a document. Empty: every sequence is one document.
  DeviceView<const std::int32_t> positions;

  /// Cuts a batch of N = `tokens` into tokens, targets and, if documents are packed, positions.
  static BatchViews cut(ConstDeviceBytes batch, std::size_t tokens) {
    const auto all = view_as<std::int32_t>(batch);
    const auto part = [&](std::size_t number) {
      return all.size() < (number + 1) * tokens ? DeviceView<const std::int32_t>()
                                                : all.subview(number * tokens, tokens);
    };
    return {part(0), part(1), part(2)};
  }
};

/// Scalars that the passes of a micro-batch need.
struct PassScalars {
  Accumulation accumulation = Accumulation::later;
  Dropout dropout;
  /// Gradient of the scaled loss with respect to the loss of one target or pair.
  float loss_gradient = 1.0F;
  /// Gradient with respect to the router losses. Equal for all micro-batches.
  float router_gradient = 0.0F;
  Preference preference;    ///< for preference pairs
  std::uint32_t shard = 0;  ///< index of this rank among the ranks of Port::routing_counts
  std::uint32_t ranks = 1;
};

/// Arguments of one pass. Views stay valid until the stream is synchronised.
struct PassArguments {
  /// Views by port; empty: not bound. The members below hold the other ports.
  std::array<DeviceBytes, kPortCount> views;
  BatchViews batch;
  /// Views of Port::output_weights and Port::output_gradient, by ascending tile.
  std::vector<DeviceBytes> output_weights, output_gradient;
  /// Routings of all ranks for the pass's micro-batch, in host memory; see RoutingCounts.
  std::span<const std::int32_t> routing_counts;
  PassScalars scalars;
  RowExchange* exchange = nullptr;  ///< for Kernel::exchanged_expert and its backward pass

  [[nodiscard]] DeviceBytes& operator[](Port port) { return views[static_cast<std::size_t>(port)]; }
  [[nodiscard]] DeviceBytes operator[](Port port) const {
    return views[static_cast<std::size_t>(port)];
  }
};

}  // namespace ballast::model
