#include "ballast/calibrate/kernel_comparison.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>
#include <set>
#include <span>
#include <vector>

#include <fmt/format.h>

#include "ballast/calibrate/machine_files.h"
#include "ballast/core/error.h"
#include "ballast/core/random.h"
#include "ballast/model/block_layout.h"
#include "ballast/model/compute.h"

#include "src/calibrate/timed_passes.h"

namespace ballast::calibrate {

namespace {

using model::Operand;
using model::OperandKind;
using model::Pass;
using model::Port;

constexpr std::uint64_t kMaxLayers = 12;
constexpr std::size_t kPattern = 65521;  ///< a prime, so that rows of a matrix differ

constexpr std::string_view kSharing = "num_kv_shared_layers";

/// Returns whether the last layers attend to keys and values of earlier ones.
bool shares_keys(const model::ModelConfig& config) {
  const auto found = config.details.find(kSharing);
  return found != config.details.end() && found->second.is_number() &&
         config.number(kSharing) > 0.0;
}

/// Returns the config with `layers` layers, of which the last `sharing` attend to keys and values
/// of earlier ones if some of the model's layers do.
model::ModelConfig with_layers(model::ModelConfig config, std::uint64_t layers,
                               std::uint64_t sharing) {
  config.num_layers = layers;
  if (shares_keys(config)) config.details.insert_or_assign(std::string(kSharing), sharing);
  // Lists have an entry per layer.
  for (auto& [key, value] : config.details) {
    if (!value.is_array()) continue;
    text::Json some = text::Json::array();
    for (std::size_t i = 0; i < std::min<std::size_t>(layers, value.elements().size()); ++i) {
      some.push_back(value.elements()[i]);
    }
    value = std::move(some);
  }
  return config;
}

std::size_t kinds_of_passes(const model::Architecture& model, DType type) {
  const model::MicroBatchShape shape = {1, 1};
  const auto program = model::write_program(model, type, {.micro_batch = shape},
                                            model::kernel_memory(model, type, shape, "host", 1));
  std::set<std::uint16_t> shapes;
  for (const Pass& pass : program.passes) shapes.insert(pass.shape);
  return shapes.size();
}

/// At most `most` uniform values in [middle - size, middle + size].
template <class T>
std::vector<T> uniform_pattern(std::size_t most, float middle, float size) {
  std::vector<T> values(std::min(kPattern, most));
  for (std::size_t i = 0; i < values.size(); ++i) {
    const float unit = static_cast<float>(random_u64(3, i) % 20001) / 10000.0F - 1.0F;
    values[i] = from_float<T>(middle + unit * size);
  }
  return values;
}

}  // namespace

model::Architecture few_layers(const engine::RunInputs& run) {
  const model::ModelConfig& config = run.model.config;
  const std::size_t all = kinds_of_passes(run.model, run.type);
  std::optional<model::Architecture> most;
  for (std::uint64_t layers = 1; layers <= std::min(kMaxLayers, config.num_layers); ++layers) {
    for (std::uint64_t sharing = 0; sharing < (shares_keys(config) ? layers : 1); ++sharing) {
      try {
        most = run.trained_like(with_layers(config, layers, sharing),
                                {.experts = run.model.split.experts});
      } catch (const Error& error) {
        // The rules of a family and the patterns of ballast.train may need more layers.
        if (error.category() != ErrorCategory::config) throw;
        continue;
      }
      if (kinds_of_passes(*most, run.type) == all) return *most;
    }
  }
  return most.value_or(run.model);
}

StepPasses::StepPasses(const model::Architecture& model, DType type, model::MicroBatchShape shape,
                       bool packed, device::DeviceOptions options,
                       const model::KernelOptions& kernels)
    : model_(model), type_(type), shape_(shape), packed_(packed) {
  const std::string_view kind = device::kind_of(options);
  const model::KernelSizes sizes = model::kernel_memory(model_, type_, shape_, kind);
  program_ = model::write_program(model_, type_, {.micro_batch = shape_, .packed = packed_}, sizes);
  order_ = training_passes(program_);
  weights_.resize(model_.blocks.size());
  row_gradients_.resize(model_.blocks.size());
  values_.resize(program_.values.size());
  sums_.resize(program_.sums.size());
  options.budget = needed() + round_up(sizes.workspace, kPage);
  device_ = device::make_device(options);
  stream_ = device_->make_stream("kernel check");
  compute_ = model::make_compute(*device_, model_, type_, shape_, kernels);
  compute_->set_workspace(allocate(compute_->sizes().workspace));
  for (std::size_t i = 0; i < weights_.size(); ++i) {
    weights_[i] = allocate(bytes_of_weights(i));
    row_gradients_[i] = allocate(program_.blocks[i].row_gradients);
  }
  for (std::size_t i = 0; i < values_.size(); ++i) {
    values_[i] = allocate(program_.bytes_of(program_.values[i]));
  }
  for (std::size_t i = 0; i < sums_.size(); ++i) {
    const model::GradientSum& sum = program_.sums[i];
    sums_[i] = allocate(sum.bytes);
    if (sum.clears) compute_->clear_gradient(*stream_, sum.block, view_as<float>(sums_[i]));
  }
  stream_->synchronize();
  fill_weights();
  fill_batch();
}

Bytes StepPasses::bytes_of_weights(std::size_t block) const {
  return std::max(model_.blocks[block].elements * size_of(type_), program_.blocks[block].selected);
}

Bytes StepPasses::needed() const {
  Bytes bytes = 0;
  for (std::size_t b = 0; b < model_.blocks.size(); ++b) {
    bytes += round_up(bytes_of_weights(b), kPage);
    bytes += round_up(program_.blocks[b].row_gradients, kPage);
  }
  for (const auto& value : program_.values) bytes += round_up(program_.bytes_of(value), kPage);
  for (const auto& sum : program_.sums) bytes += round_up(sum.bytes, kPage);
  return bytes;
}

DeviceBytes StepPasses::allocate(Bytes bytes) {
  return bytes == 0 ? DeviceBytes() : device_->allocate(bytes, "checking kernels");
}

void StepPasses::fetch(HostBytes to, ConstDeviceBytes from) {
  device_->copy_to_host(*stream_, to, from);
  stream_->synchronize();
}
void StepPasses::put(DeviceBytes to, ConstHostBytes from) {
  device_->copy_to_device(*stream_, to, from);
  stream_->synchronize();
}

/// Values of a size that keeps that of activations.
void StepPasses::fill_tensor(DeviceBytes to, const model::TensorSpec& tensor) {
  const bool is_vector = tensor.shape.size() < 2;
  const auto inputs = static_cast<float>(tensor.shape.back());
  with_training_type(type_, [&](auto of_type) {
    using T = decltype(of_type);
    const std::vector<T> values =
        is_vector ? uniform_pattern<T>(tensor.size, 1.0F, 0.2F)
                  : uniform_pattern<T>(tensor.size, 0.0F, std::sqrt(3.0F / inputs));
    const ConstHostBytes bytes = std::as_bytes(std::span(values));
    for (Bytes done = 0; done < to.size();) {
      const Bytes size = std::min<Bytes>(bytes.size(), to.size() - done);
      device_->copy_to_device(*stream_, to.subview(done, size), bytes.first(size));
      done += size;
    }
    stream_->synchronize();
  });
}

void StepPasses::fill_weights() {
  for (std::size_t b = 0; b < weights_.size(); ++b) {
    for (const model::TensorSpec& tensor : model_.blocks[b].tensors) {
      const Bytes size = size_of(type_);
      fill_tensor(weights_[b].subview(tensor.offset * size, tensor.size * size), tensor);
    }
  }
}

/// Tokens, targets, sum rows and, if they are packed, positions of two documents per sequence.
void StepPasses::fill_batch() {
  const std::size_t tokens = shape_.tokens();
  const std::uint64_t document = shape_.length / 2 + 1;
  std::vector<std::int32_t> batch;
  for (std::size_t i = 0; i < 2 * tokens; ++i) {
    batch.push_back(static_cast<std::int32_t>(random_u64(5, i) % model_.config.vocab_size));
  }
  const std::vector<std::int32_t> sum_rows =
      model::number_sum_rows(model_, std::span(batch).first(tokens));
  batch.insert(batch.end(), sum_rows.begin(), sum_rows.end());
  for (std::size_t i = 0; packed_ && i < tokens; ++i) {
    batch.push_back(static_cast<std::int32_t>(i % shape_.length % document));
  }
  for (std::size_t i = 0; i < values_.size(); ++i) {
    if (!program_.classes[program_.values[i].of].from_host) continue;
    put(values_[i], std::as_bytes(std::span(batch)).first(values_[i].size()));
  }
}

std::string StepPasses::name_of(model::PassId id) const {
  const Pass& pass = program_.passes[id];
  return fmt::format("{} of {}", model::work_of(pass.kernel), program_.blocks[pass.block].name);
}

DeviceBytes StepPasses::memory_of(const Operand& operand) const {
  switch (operand.kind) {
    case OperandKind::weights:
      return weights_[operand.number];
    case OperandKind::rows:
      return operand.access == model::OperandAccess::reads ? weights_[operand.number]
                                                           : row_gradients_[operand.number];
    case OperandKind::gradient:
      return sums_[operand.number];
    case OperandKind::value:
      return values_[operand.number];
    case OperandKind::workspace:
      break;
  }
  return {};
}

model::PassArguments StepPasses::arguments_of(const Pass& pass) {
  std::vector<DeviceBytes> memory;
  memory.reserve(pass.operands.size());
  counts_.clear();
  for (const Operand& operand : pass.operands) {
    memory.push_back(is_bound(operand) ? memory_of(operand) : DeviceBytes());
    if (operand.port != Port::routing_counts) continue;
    counts_.resize(memory.back().size() / sizeof(std::int32_t));
    fetch(std::as_writable_bytes(std::span(counts_)), memory.back());
  }
  model::PassArguments arguments = bind_pass(pass, shape_.tokens(), memory);
  arguments.routing_counts = counts_;
  arguments.scalars = {.accumulation = model::Accumulation::first,
                       .dropout = {.on = true, .key = 11},
                       .loss_gradient = 1.0F,
                       .router_gradient = 0.01F};
  return arguments;
}

void StepPasses::run(model::PassId id) {
  const Pass& pass = program_.passes[id];
  compute_->run(*stream_, pass, arguments_of(pass));
  stream_->synchronize();
}

namespace {

using model::Difference;

constexpr std::uint64_t kRowsOnHost = 64;

/// Largest differences that rounding and other orders of sums explain, with room for a layer in
/// 16-bit types whose results cancel. A wrong row or column exceeds them.
bool is_rounding(const Difference& difference, bool wide) {
  const double mean = wide ? 1e-3 : 0.05;
  const double most = wide ? 0.05 : 1.0;
  return difference.finite && difference.mean <= mean && difference.most <= most;
}

template <class T>
Difference difference_of(std::span<const std::byte> found, std::span<const std::byte> expected) {
  model::DifferenceSum sum;
  const auto* const a = reinterpret_cast<const T*>(found.data());
  const auto* const b = reinterpret_cast<const T*>(expected.data());
  for (std::size_t i = 0; i < expected.size() / sizeof(T); ++i)
    sum.add(model::to_double(a[i]), model::to_double(b[i]));
  return sum.result();
}

/// Compares the passes of one device with those of another.
class PassComparison {
 public:
  PassComparison(DType type, StepPasses& found, StepPasses& expected)
      : type_(type), found_(found), expected_(expected) {}

  KernelComparison run(model::PassId pass) {
    KernelComparison worst = {.name = found_.name_of(pass), .compared = true, .agrees = true};
    found_.run(pass);
    expected_.run(pass);
    for (const Operand& operand : found_.program().passes[pass].operands) {
      if (operand.access == model::OperandAccess::reads || !is_bound(operand)) continue;
      compare(operand, worst);
    }
    return worst;
  }

 private:
  /// Also copies the expected result to the other device, so that differences do not grow, and that
  /// both dispatch the same rows to experts.
  void compare(const Operand& operand, KernelComparison& worst) {
    const DeviceBytes found = found_.memory_of(operand);
    const DeviceBytes expected = expected_.memory_of(operand);
    if (found.empty() || found.size() != expected.size()) return;
    found_bytes_.resize(found.size());
    expected_bytes_.resize(found.size());
    found_.fetch(found_bytes_, found);
    expected_.fetch(expected_bytes_, expected);
    found_.put(found, expected_bytes_);
    const std::optional<Difference> difference = difference_at(operand.port);
    if (!difference) return;
    worst.agrees = worst.agrees && is_rounding(*difference, type_ == DType::f32);
    if (!worst.port.empty() && difference->finite && difference->mean <= worst.difference.mean) {
      return;
    }
    worst.port = to_string(operand.port);
    worst.difference = *difference;
  }

  [[nodiscard]] std::optional<Difference> difference_at(Port port) const {
    std::optional<Difference> found;
    model::with_numbers(port, type_, [&](auto of_type) {
      found = difference_of<decltype(of_type)>(found_bytes_, expected_bytes_);
    });
    return found;
  }

  DType type_;
  StepPasses& found_;
  StepPasses& expected_;
  std::vector<std::byte> found_bytes_;
  std::vector<std::byte> expected_bytes_;
};

void check_interrupt(const std::atomic<bool>* interrupted) {
  if (interrupted != nullptr && *interrupted)
    throw Error(ErrorCategory::interrupted, "interrupted");
}

/// One kind of device and kernels.
struct KernelsOfSide {
  device::DeviceOptions device;
  model::KernelOptions kernels;
};

std::vector<KernelComparison> compare(const engine::RunInputs& run, std::uint64_t length,
                                      const KernelsOfSide& found, const KernelsOfSide& expected,
                                      const std::atomic<bool>* interrupted) {
  const model::Architecture model = few_layers(run);
  const auto passes = [&](const KernelsOfSide& side) {
    return StepPasses(model, run.type, {1, length}, run.batch.packed, side.device, side.kernels);
  };
  StepPasses ours = passes(found);
  StepPasses reference = passes(expected);
  PassComparison comparison(run.type, ours, reference);
  std::vector<KernelComparison> all;
  for (const model::PassId pass : ours.order()) {
    check_interrupt(interrupted);
    all.push_back(comparison.run(pass));
  }
  return all;
}

KernelsOfSide on_gpu(const engine::RunInputs& run) {
  return {run.devices.first(), kernel_options(run.kernels)};
}

}  // namespace

std::vector<KernelComparison> compare_with_host(const engine::RunInputs& run,
                                                const std::atomic<bool>* interrupted) {
  const KernelsOfSide host = {{.kind = "host", .type = run.type}, {}};
  return compare(run, std::min(run.batch.shape.whole_length(), kRowsOnHost), on_gpu(run), host,
                 interrupted);
}

std::vector<KernelComparison> compare_with_plain(const engine::RunInputs& run, std::uint64_t length,
                                                 const std::atomic<bool>* interrupted) {
  KernelsOfSide plain = on_gpu(run);
  plain.kernels = {.set = model::KernelSet::plain};
  return compare(run, length, on_gpu(run), plain, interrupted);
}

std::vector<KernelComparison> compare_products(const engine::RunInputs& run, std::uint64_t length,
                                               const std::atomic<bool>* interrupted) {
  const KernelsOfSide side = on_gpu(run);
  StepPasses passes(few_layers(run), run.type, {1, length}, run.batch.packed, side.device,
                    side.kernels);
  const std::vector<model::ProductCheck> checks = model::check_products([&] {
    for (const model::PassId pass : passes.order()) {
      check_interrupt(interrupted);
      passes.run(pass);
    }
  });
  std::vector<KernelComparison> all;
  all.reserve(checks.size());
  for (const model::ProductCheck& check : checks) {
    all.push_back({.name = "product " + check.product,
                   .difference = check.difference,
                   .compared = check.compared,
                   .agrees = is_rounding(check.difference, check.wide)});
  }
  return all;
}

}  // namespace ballast::calibrate
