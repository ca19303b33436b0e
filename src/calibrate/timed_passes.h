#pragma once

#include <array>
#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "ballast/core/dtype.h"
#include "ballast/core/memory.h"
#include "ballast/device/device.h"
#include "ballast/model/architecture.h"
#include "ballast/model/compute.h"
#include "ballast/model/step_program.h"

#include "src/calibrate/calibration.h"

namespace ballast::calibrate {

/// Returns the passes of a training step of one micro-batch, in order. A head in tiles visits each
/// tile.
std::vector<model::PassId> training_passes(const model::StepProgram& program);

/// Returns whether passes outside of a run get memory for the operand. They do without the
/// intermediates of the forward pass, so that the backward pass recomputes them, and the workspace
/// belongs to model::Compute.
bool is_bound(const model::Operand& operand);

/// Returns the bytes of an operand that is_bound().
Bytes bytes_of(const model::Operand& operand, const model::StepProgram& program,
               const model::Architecture& model, DType type);

/// Returns the arguments of `pass` for a micro-batch of `tokens` tokens. `memory` has the device
/// memory of each operand, in the order of the operands; it is empty for those that are not bound.
/// Row counts, which are in host memory, are left out.
model::PassArguments bind_pass(const model::Pass& pass, std::uint64_t tokens,
                               std::span<const DeviceBytes> memory);

/// Passes of the sample's layers and head for micro-batches of one size, on a separate device. They
/// are the passes of the model's step program, one of each kind: a pass of each layer that no other
/// layer has in the same form. Their arguments are derived from the operands of the program. The
/// passes of a kind share their memory, except for weights and gradients, which change with each
/// call so that they are as cold in the caches as in a step.
class TimedPasses {
 public:
  TimedPasses(const Sample& sample, model::MicroBatchShape shape);

  /// The work of one pass, averaged over the passes of a step.
  struct Work {
    double flops = 0.0;
    double attention_flops = 0.0;  ///< the part of one forward pass of attention
    double adapter_traffic = 0.0;  ///< bytes; see model::PassCost
    double traffic = 0.0;          ///< bytes; see model::PassCost
    double passes = 0.0;           ///< number of passes per micro-batch; 0: the step has none
  };
  /// `curve`: passes through layers forward or backward, or of the head. The backward pass
  /// recomputes the forward pass. `only`: layers with attention of this class.
  [[nodiscard]] Work work(model::CostCurve curve, std::optional<AttentionClass> only = {}) const;
  /// Seconds of one pass, averaged over the passes of a step.
  double seconds(model::CostCurve curve, std::optional<AttentionClass> only = {});
  [[nodiscard]] double tokens() const { return static_cast<double>(shape_.tokens()); }

  /// Runs a forward and a backward pass through a layer and waits for them. The next call takes the
  /// next kind of layer.
  void layer_pass();
  /// Runs one pass of each kind and waits for them.
  void run_each();

 private:
  /// Passes with the same kernels and the same work.
  struct Kind {
    model::PassId pass = 0;
    double count = 0.0;
    model::PassCost cost;
  };
  /// Port of an argument, its number among those of the port, and whether the head reads it.
  struct Slot {
    model::Port port = model::Port::workspace;
    std::size_t number = 0;
    bool head = false;
    auto operator<=>(const Slot&) const = default;
  };

  void find_kinds();
  void find_slots();
  [[nodiscard]] std::vector<Slot> slots_of(const model::Pass& pass) const;
  [[nodiscard]] std::size_t copies_of(const Slot& slot) const;
  void allocate_slots();
  void fill(DeviceBytes bytes, float scale);
  void enqueue(const Kind& kind);
  double seconds(const Kind& kind, std::size_t kinds);
  [[nodiscard]] std::vector<Kind> kinds(model::CostCurve curve,
                                        std::optional<AttentionClass> only = {}) const;

  const model::Architecture& model_;
  DType type_;
  model::MicroBatchShape shape_;
  model::Accumulation accumulation_;
  const Sample& sample_;
  model::StepProgram program_;
  std::array<std::vector<Kind>, 3> kinds_;  ///< by CostCurve
  std::size_t copies_ = 1;                  ///< copies of the weights and gradients of a layer
  std::map<Slot, Bytes> sizes_;
  std::unique_ptr<device::Device> device_;
  std::unique_ptr<device::Stream> stream_;
  std::unique_ptr<model::Compute> compute_;
  std::map<Slot, std::vector<DeviceBytes>> memory_;
  std::size_t turn_ = 0;
  std::size_t layer_turn_ = 0;
};

}  // namespace ballast::calibrate
