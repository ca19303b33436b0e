#pragma once

#include "ballast/model/pass_arguments.h"
#include "ballast/model/step_program.h"

#include "src/engine/routing_buffers.h"

namespace ballast::engine {

/// The pass of a compute operation and the arguments that the operation's buffers make up.
class PassBuffers : public RoutingBuffers {
 public:
  using RoutingBuffers::RoutingBuffers;

  /// Throws Error(state) if the operation is not a pass.
  [[nodiscard]] model::Pass pass() const;
  [[nodiscard]] model::PassArguments arguments(const model::PassScalars& scalars,
                                               model::RowExchange* exchange) const;

 private:
  [[nodiscard]] model::Kernel kernel() const;
  [[nodiscard]] model::Kernel forward_kernel() const;
  [[nodiscard]] model::Kernel backward_kernel() const;
  [[nodiscard]] model::Port port_of(Role role) const;
  /// The tile of the vocabulary in the operation's block, if it has one.
  [[nodiscard]] std::uint32_t tile() const;
  /// The part of a device buffer that a pass sees through `port`.
  [[nodiscard]] DeviceBytes view(const Use& use, model::Port port) const;
  [[nodiscard]] DeviceBytes losses(const Use& use) const;
};

}  // namespace ballast::engine
