#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ballast/device/device.h"
#include "ballast/engine/run_inputs.h"
#include "ballast/model/compute.h"
#include "ballast/model/cuda_libraries.h"
#include "ballast/model/step_program.h"

namespace ballast::calibrate {

/// Returns the architecture of `run` with the fewest layers that have all kinds of passes.
model::Architecture few_layers(const engine::RunInputs& run);

/// A training step of one micro-batch on one device, pass by pass, where every value, weight and
/// gradient sum has its own device memory. Weights and the batch are the same for every device.
class StepPasses {
 public:
  /// `options.budget` is replaced by the memory that the passes need.
  StepPasses(const model::Architecture& model, DType type, model::MicroBatchShape shape,
             bool packed, device::DeviceOptions options, const model::KernelOptions& kernels);

  [[nodiscard]] const model::StepProgram& program() const { return program_; }
  /// The passes of the step, in order.
  [[nodiscard]] const std::vector<model::PassId>& order() const { return order_; }
  /// "backward of layer 0"
  [[nodiscard]] std::string name_of(model::PassId pass) const;
  /// Runs a pass and waits for it.
  void run(model::PassId pass);
  /// Device memory of an operand; empty for the workspace.
  [[nodiscard]] DeviceBytes memory_of(const model::Operand& operand) const;
  void fetch(HostBytes to, ConstDeviceBytes from);
  void put(DeviceBytes to, ConstHostBytes from);

 private:
  [[nodiscard]] Bytes bytes_of_weights(std::size_t block) const;
  [[nodiscard]] Bytes needed() const;
  DeviceBytes allocate(Bytes bytes);
  void fill_weights();
  void fill_batch();
  void fill_tensor(DeviceBytes to, const model::TensorSpec& tensor);
  [[nodiscard]] model::PassArguments arguments_of(const model::Pass& pass);

  model::Architecture model_;
  DType type_;
  model::MicroBatchShape shape_;
  bool packed_;
  model::StepProgram program_;
  std::vector<model::PassId> order_;
  std::unique_ptr<device::Device> device_;
  std::unique_ptr<device::Stream> stream_;
  std::unique_ptr<model::Compute> compute_;
  std::vector<DeviceBytes> weights_;        ///< by block
  std::vector<DeviceBytes> row_gradients_;  ///< by block
  std::vector<DeviceBytes> values_;
  std::vector<DeviceBytes> sums_;
  std::vector<std::int32_t> counts_;  ///< row counts for the running pass
};

/// Comparison of the result of one kernel, or of one pass of a block, with a reference.
struct KernelComparison {
  std::string name;  ///< "backward of layer 0", "product [64, 4096, 1024] of bf16, ..."
  std::string port;  ///< the result that differs most: "gradient"; "" for a product
  model::Difference difference;
  bool compared = false;  ///< false: there was no memory for it
  bool agrees = false;    ///< the difference is that of rounding and of another order of sums
};

/// Runs every kind of pass of a training step of `run`'s model, with all widths of the model but
/// few layers, on the CUDA device and on the host device, for one sequence of at most 64 tokens.
/// Each pass starts with equal inputs on both, so that the first kernel that is wrong is named.
/// Takes memory for the weights and gradients of these layers, twice. Throws Error.
std::vector<KernelComparison> compare_with_host(const engine::RunInputs& run,
                                                const std::atomic<bool>* interrupted = nullptr);

/// Runs these passes for one sequence of `length` tokens on the CUDA device, with the kernels of
/// the config and with the plain kernels.
std::vector<KernelComparison> compare_with_plain(const engine::RunInputs& run, std::uint64_t length,
                                                 const std::atomic<bool>* interrupted = nullptr);

/// Checks the matrix products of these passes: model::check_products(). Empty with plain kernels.
std::vector<KernelComparison> compare_products(const engine::RunInputs& run, std::uint64_t length,
                                               const std::atomic<bool>* interrupted = nullptr);

}  // namespace ballast::calibrate
