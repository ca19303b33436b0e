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

/// Moves rows between ranks (comm::Communicator::all_to_all): those that share the experts of a
/// block, or those that share sequences.
class RowExchange {
 public:
  virtual ~RowExchange() = default;
  RowExchange() = default;
  RowExchange(const RowExchange&) = delete;
  RowExchange& operator=(const RowExchange&) = delete;

  /// Enqueues an all-to-all on `stream`: sends part p of `input` to the rank with expert p of a
  /// block, or with part p of the sequences, and receives part p of `output` from it. Sizes of the
  /// parts are in bytes. Kernels call it inside of work on `stream`, too.
  virtual void exchange(device::Stream& stream, ConstDeviceBytes input,
                        std::span<const Bytes> input_parts, DeviceBytes output,
                        std::span<const Bytes> output_parts) = 0;
};

/// This rank's place among the ranks that share its sequences.
struct SequencePart {
  std::uint32_t number = 0;         ///< below MicroBatchShape::parts
  RowExchange* exchange = nullptr;  ///< member p has part p; null if there is one part
};

/// Port::batch in its parts, each [N] or empty.
struct BatchViews {
  DeviceView<const std::int32_t> tokens;   ///< in [0, V)
  DeviceView<const std::int32_t> targets;  ///< below V; rows with a negative target have no loss
  /// Position of each token in its document: 0, or one more than the preceding token's. Attention
  /// stays inside a document. Empty: every sequence is one document.
  DeviceView<const std::int32_t> positions;
  /// Positions of all tokens of the sequences [sequences, whole length], for the mask of attention.
  /// Only given for packed documents of which this rank has a part.
  DeviceView<const std::int32_t> whole_positions = {};
  /// For each token the number of its row in the gradient sum of its vocabulary tile. Equal tokens
  /// of a step have the same slot, so that the sum has a row per distinct token (slots.h).
  DeviceView<const std::int32_t> slots = {};

  /// Cuts a batch of N = `tokens` of a rank, which has one of `parts` parts of its sequences, into
  /// tokens, targets, slots and positions. Positions are there if documents are packed or if there
  /// are several parts.
  static BatchViews cut(ConstDeviceBytes batch, std::size_t tokens, std::size_t parts = 1) {
    const auto all = view_as<std::int32_t>(batch);
    const auto part = [&](std::size_t number, std::size_t size) {
      return all.size() < number * tokens + size ? DeviceView<const std::int32_t>()
                                                 : all.subview(number * tokens, size);
    };
    return {part(0, tokens), part(1, tokens), part(3, tokens),
            parts == 1 ? DeviceView<const std::int32_t>() : part(4, parts * tokens),
            part(2, tokens)};
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
  /// For Kernel::router: correction biases [experts] in host memory instead of those in the block's
  /// weights, which empty means. They stay valid until the stream is synchronised.
  std::span<const float> correction_biases;
  PassScalars scalars;
  RowExchange* exchange = nullptr;  ///< for Kernel::exchanged_expert and its backward pass
  SequencePart sequence_part;       ///< for Kernel::layer and its backward pass

  [[nodiscard]] DeviceBytes& operator[](Port port) { return views[static_cast<std::size_t>(port)]; }
  [[nodiscard]] DeviceBytes operator[](Port port) const {
    return views[static_cast<std::size_t>(port)];
  }
};

}  // namespace ballast::model
