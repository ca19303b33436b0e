#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ballast/core/view.h"
#include "ballast/model/compute.h"
#include "ballast/schedule/labels.h"

#include "src/engine/current_operation.h"

namespace ballast::engine {

/// fp32 sums of the gradient of the output matrix's tile `number` in `buffer`.
DeviceView<float> gradient_of_tile(const CurrentOperation& at, schedule::BufferId buffer,
                                   std::size_t number);

/// What a compute operation binds to the ports of its pass, cut to the sizes of its block.
class PassBuffers {
 public:
  using Port = model::Port;

  explicit PassBuffers(const CurrentOperation& at) : at_(at) {}

  [[nodiscard]] bool has(Port port) const { return at_.has(schedule::role_of(port)); }
  /// Empty if the operation does not bind `port`.
  [[nodiscard]] DeviceBytes bytes(Port port, Bytes size) const {
    return has(port) ? at_.device(schedule::role_of(port), size) : DeviceBytes();
  }

  [[nodiscard]] DeviceBytes kept() const {
    return bytes(Port::kept, at_.work().intermediate_bytes);
  }
  [[nodiscard]] DeviceBytes weights() const {
    return bytes(Port::weights, at_.work().whole_weight_bytes());
  }
  /// Empty if the block is frozen.
  [[nodiscard]] DeviceView<float> gradient() const {
    return view_as<float>(bytes(Port::gradient, at_.work().accumulator_bytes));
  }
  [[nodiscard]] DeviceBytes normed() const {
    return bytes(Port::normed, at_.workload().rows_bytes);
  }
  [[nodiscard]] DeviceView<float> partial_sums() const {
    return view_as<float>(bytes(Port::partial_sums, at_.workload().row_sums_bytes));
  }
  [[nodiscard]] DeviceView<double> router_totals() const {
    return view_as<double>(bytes(Port::router_totals, at_.workload().router_totals_bytes));
  }
  [[nodiscard]] DeviceBytes input() const { return activation(Port::input); }
  [[nodiscard]] DeviceBytes output() const { return activation(Port::output); }
  [[nodiscard]] DeviceBytes flow() const { return activation(Port::activation_gradient); }
  [[nodiscard]] DeviceView<const std::int32_t> tokens() const { return batch_part(0); }
  [[nodiscard]] DeviceView<const std::int32_t> targets() const { return batch_part(1); }
  /// Empty if every sequence is one document.
  [[nodiscard]] DeviceView<const std::int32_t> positions() const {
    if (!at_.workload().packed) return {};
    return batch_part(2);
  }
  [[nodiscard]] model::RouterResults router_results() const;

  /// Of the head, for the operation's micro-batch; empty if the operation reports none.
  [[nodiscard]] DeviceView<double> losses() const;
  /// Weights of rows in the losses of pairs; empty without pairs.
  [[nodiscard]] DeviceView<float> row_weights() const;
  [[nodiscard]] model::HeadLosses head_losses() const;

  /// All tiles of the vocabulary, for an operation on the whole head.
  [[nodiscard]] std::vector<model::OutputTile> tiles() const;
  /// The tile of the operation's block.
  [[nodiscard]] model::OutputTile tile() const;

 private:
  [[nodiscard]] DeviceBytes activation(Port port) const {
    return bytes(port, at_.workload().activation_bytes);
  }
  [[nodiscard]] DeviceView<const std::int32_t> batch_part(std::size_t part) const;
  [[nodiscard]] DeviceView<double> reference_losses() const;
  [[nodiscard]] std::vector<schedule::BufferId> bound_to(Port port) const;

  const CurrentOperation& at_;
};

}  // namespace ballast::engine
