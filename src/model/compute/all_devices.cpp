#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <numbers>
#include <span>
#include <vector>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/core/random.h"
#include "ballast/device/streams.h"
#include "ballast/model/architecture.h"
#include "ballast/model/attention.h"
#include "ballast/model/compute.h"
#include "ballast/model/cuda_libraries.h"

#include "src/model/compute/factories.h"
#include "src/model/compute/layer_shapes.h"
#include "src/model/description/layer_rules.h"
#include "src/model/host/kernel_tables.h"
#include "src/model/host/products.h"
#include "src/model/ops/device_ops.h"

namespace ballast::model {

namespace {

bool is_cuda(std::string_view kind) {
  if (kind == "host" || kind == "cuda") return kind == "cuda";
  throw Error(ErrorCategory::device,
              fmt::format("device '{}' has no model kernels; use host or cuda", kind));
}

void require_shape(const Architecture& model, MicroBatchShape shape) {
  if (shape.sequences == 0 || shape.length == 0 || shape.slices == 0) {
    throw Error(ErrorCategory::config,
                fmt::format("a micro-batch of {} sequences of {} tokens is empty", shape.sequences,
                            shape.length));
  }
  if (!model.outer.positions.empty() && shape.whole_length() > model.config.max_sequence) {
    throw Error(ErrorCategory::config,
                fmt::format("sequences have {} tokens, but the model has only {} positions; raise "
                            "model.max_sequence or shorten data.sequence_length",
                            shape.whole_length(), model.config.max_sequence));
  }
}

}  // namespace

KernelExtents kernel_extents(const Architecture& model, MicroBatchShape shape) {
  const ModelConfig config = config_of_tile(model.config);
  const std::vector<LayerSpec> layers = widest_tiles(model);
  KernelExtents extents = {.shape = shape,
                           .hidden = config.hidden_size,
                           .vocabulary = config.vocab_size,
                           .heads = attention_shapes(config, shape),
                           .epsilon = static_cast<float>(config.norm_epsilon)};
  extents.delta = delta_shape(config, extents.heads.front());
  extents.widest_sum = std::max({widest_row(extents.heads), extents.hidden,
                                 static_cast<std::size_t>(config.intermediate_size),
                                 static_cast<std::size_t>(widest_sum(layers))});
  extents.has_layer_inputs = layer_input_width(layers) > 0;
  return extents;
}

std::unique_ptr<Compute> make_compute(device::Device& device, const Architecture& model, DType type,
                                      MicroBatchShape shape, const KernelOptions& options) {
  const bool cuda = is_cuda(device.kind());
  require_shape(model, shape);
  if (cuda) {
    cuda::require_gpu_for(model.config);
    return cuda::make_cuda_compute(model, type, shape, options);
  }
  return host::make_host_compute(device, model, type, shape);
}

KernelSizes kernel_memory(const Architecture& model, DType type, MicroBatchShape shape,
                          std::string_view device_kind, int compute_threads) {
  const bool cuda = is_cuda(device_kind);
  require_shape(model, shape);
  const int threads = compute_threads > 0 ? compute_threads : device::default_compute_threads();
  // All tensor places need the same memory.
  const auto first =
      model.split.tensor > 1 ? std::make_unique<Architecture>(at_tensor_place(model, 0)) : nullptr;
  const Architecture& own = first ? *first : model;
  const auto compute =
      cuda ? cuda::make_cuda_compute(own, type, shape, {.attention = AttentionBackend::own})
           : host::make_host_compute(own, type, shape, static_cast<std::size_t>(threads));
  return compute->sizes();
}

double attention_flops(const AttentionShape& e, AttentionPass pass) {
  const double products = pass == AttentionPass::own_backward ? 5.0 : 2.0;
  const auto length = static_cast<double>(e.length);
  const double pairs = length * length / 2.0;
  return products * 2.0 * pairs * static_cast<double>(e.sequences * e.heads * e.head_dim);
}

std::string host_kernels(int threads) {
  return host::describe_arithmetic(static_cast<std::size_t>(threads));
}

double measure_gemm_peak(device::Device& device, DType type, double seconds, KernelSet set) {
  if (is_cuda(device.kind())) return cuda::measure_cuda_gemm_peak(device, type, seconds, set);
  return host::measure_host_gemm_peak(device, type, seconds);
}

namespace {

/// Makes four standard normal numbers from one call of the generator, by the Box-Muller transform.
std::array<double, 4> four_normals(std::uint64_t seed, std::uint64_t counter,
                                   std::uint64_t stream) {
  const auto words = philox(seed, counter, stream);
  std::array<double, 4> out{};
  for (std::size_t pair = 0; pair < 2; ++pair) {
    const double u1 = (static_cast<double>(words[2 * pair]) + 0.5) * 0x1p-32;
    const double u2 = (static_cast<double>(words[2 * pair + 1]) + 0.5) * 0x1p-32;
    const double radius = std::sqrt(-2.0 * std::log(u1));
    const double angle = 2.0 * std::numbers::pi * u2;
    out[2 * pair] = radius * std::cos(angle);
    out[2 * pair + 1] = radius * std::sin(angle);
  }
  return out;
}

/// Normal numbers of several groups, made by one call of the kernel.
struct NormalBatch {
  static constexpr Elems kSize = 4 * host::kNormalGroups;
  std::array<float, kSize> values;

  /// Computes elements [first, first + kSize), which begin a group. The kernel is faster than the C
  /// library. Where its error could change the rounding, the library's result is used.
  void make(const TensorSpec& tensor, std::uint64_t seed, std::uint64_t stream, Elems first) {
    static const auto kernel = host::kernel_tables().back()->normals;
    std::array<std::size_t, host::kNormalGroups> doubtful;
    const std::uint64_t group = first / 4;
    const std::size_t doubts =
        kernel(seed, stream, group, tensor.stddev, values.data(), doubtful.data());
    for (const std::size_t i : std::span(doubtful).first(doubts)) {
      const auto normals = four_normals(seed, group + i, stream);
      for (std::size_t k = 0; k < normals.size(); ++k) {
        values[4 * i + k] = static_cast<float>(tensor.stddev * normals[k]);
      }
    }
  }
};

/// Position of element `first` in the whole tensor, and the number of elements that follow it
/// there. The order of rows in files does not affect values.
TensorRun run_of_values(const TensorSpec& tensor, Elems first) {
  if (tensor.cuts_rows()) return run_in_files(tensor, first);
  const Elems all = tensor.rows_in_all * tensor.columns_in_all;
  if (tensor.stored.parts == 1 || tensor.stored.stacked > 0 || tensor.size == all) {
    return {tensor.first_element() + first, tensor.size - first};
  }
  // The block has some groups, and memory has them part by part.
  const Elems part = tensor.size / tensor.stored.parts;
  const Elems inside = first % part;
  return {first / part * (all / tensor.stored.parts) +
              tensor.first_element() / tensor.stored.parts + inside,
          part - inside};
}

/// Fills normal values. Element i of the whole tensor is number i mod 4 of group i / 4.
void fill_normal(const TensorSpec& tensor, std::uint64_t seed, Elems first, std::span<float> out) {
  const std::uint64_t stream = fnv1a(tensor.name);
  NormalBatch batch;
  TensorRun run;
  while (!out.empty()) {
    if (run.count == 0) run = run_of_values(tensor, first);
    const Elems before = run.first % NormalBatch::kSize;
    batch.make(tensor, seed, stream, run.first - before);
    const Elems count = std::min<Elems>({NormalBatch::kSize - before, run.count, out.size()});
    std::copy_n(batch.values.data() + before, count, out.data());
    run = {run.first + count, run.count - count};
    first += count;
    out = out.subspan(count);
  }
}

/// Fills uniform values or their logarithms. Element i of the whole tensor is number i mod 4 of
/// group i / 4. Such tensors are cut by rows only.
void fill_uniform(const TensorSpec& tensor, std::uint64_t seed, Elems first, std::span<float> out) {
  const std::uint64_t stream = fnv1a(tensor.name);
  std::array<std::uint32_t, 4> words{};
  for (std::size_t i = 0; i < out.size(); ++i) {
    const Elems at = tensor.first_element() + first + i;
    if (i == 0 || at % 4 == 0) words = philox(seed, at / 4, stream);
    const double unit = (static_cast<double>(words[at % 4]) + 0.5) * 0x1p-32;
    out[i] =
        static_cast<float>(tensor.init == Init::log_uniform ? std::log(tensor.stddev * unit)
                                                            : tensor.stddev * (2.0 * unit - 1.0));
  }
}

}  // namespace

void initialize(const TensorSpec& tensor, std::uint64_t seed, Elems first, std::span<float> out) {
  switch (tensor.init) {
    case Init::zeros:
      std::fill(out.begin(), out.end(), 0.0F);
      return;
    case Init::ones: {
      // Only the first addend of a value is 1.
      const Elems ones = tensor.size / tensor.stored.addends;
      for (Elems i = 0; i < out.size(); ++i) out[i] = first + i < ones ? 1.0F : 0.0F;
      return;
    }
    case Init::normal:
      fill_normal(tensor, seed, first, out);
      return;
    case Init::uniform:
    case Init::log_uniform:
      fill_uniform(tensor, seed, first, out);
      return;
    case Init::row_norms:
      throw Error(ErrorCategory::state, "magnitudes are computed from the weights of their map");
  }
}

void DifferenceSum::add(double value, double reference) {
  const double error = std::abs(value - reference);
  finite_ = finite_ && std::isfinite(error);
  squares_ += reference * reference;
  errors_ += error * error;
  most_ = std::max(most_, error);
  ++count_;
}

Difference DifferenceSum::result() const {
  if (count_ == 0) return {};
  const double size = std::sqrt(squares_ / static_cast<double>(count_));
  if (size == 0.0) return {.mean = most_, .most = most_, .finite = finite_};
  return {.mean = std::sqrt(errors_ / static_cast<double>(count_)) / size,
          .most = most_ / size,
          .finite = finite_};
}

}  // namespace ballast::model
