#pragma once

#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "ballast/core/random.h"
#include "ballast/device/device.h"
#include "ballast/model/compute.h"

#include "tests/support/device_kind.h"
#include "tests/support/kernels.h"
#include "tests/unit/model/numbers.h"

namespace ballast::test {

/// Odd sizes, as far as the device supports them: on CUDA multiples of 8.
inline std::uint64_t odd(std::uint64_t on_host, std::uint64_t on_cuda) {
  return device_kind() == "cuda" ? on_cuda : on_host;
}

inline model::ModelConfig small_gpt2() {
  model::ModelConfig c;
  c.family = "gpt2";
  c.vocab_size = 61;
  c.hidden_size = odd(36, 72);
  c.num_layers = 2;
  c.num_heads = 3;
  c.num_kv_heads = 3;
  c.intermediate_size = odd(50, 56);
  c.max_sequence = 80;
  return c;
}

/// Groups of three query heads.
inline model::ModelConfig small_llama() {
  model::ModelConfig c;
  c.family = "llama";
  c.vocab_size = 61;
  c.hidden_size = odd(36, 48);
  c.num_layers = 2;
  c.num_heads = 6;
  c.num_kv_heads = 2;
  c.intermediate_size = odd(45, 56);
  c.tie_embeddings = false;
  return c;
}

/// A device with the kernels of one model and memory for their calls. `threads`: of the host
/// device's kernels. `kind`: the device.
struct Bench {
  Bench(const model::ModelConfig& config, DType type, model::MicroBatchShape shape, int threads = 2,
        const std::string& kind = device_kind())
      : Bench(model::build_architecture(config), type, shape, threads, kind) {}
  Bench(model::Architecture model, DType type, model::MicroBatchShape shape, int threads = 2,
        const std::string& kind = device_kind())
      : architecture(std::move(model)), shape(shape), type(type) {
    device::DeviceOptions options;
    options.kind = kind;
    options.budget = odd(1 * kGiB, 256 * kMiB);
    options.compute_threads = threads;
    device = device::make_device(options);
    stream = device->make_stream("compute");
    compute = model::make_compute(*device, architecture, type, shape);
    compute->set_workspace(device->allocate(compute->sizes().workspace, "workspace"));
  }

  [[nodiscard]] KernelCalls kernels() const { return {architecture, *compute}; }
  [[nodiscard]] std::size_t activations() const {
    return shape.tokens() * architecture.config.hidden_size;
  }
  /// Values rounded to the training type, in device memory.
  template <class T>
  DeviceBytes upload(const std::vector<T>& values) {
    return with_training_type(type, [&](auto of_type) {
      std::vector<decltype(of_type)> rounded;
      for (const T value : values) {
        rounded.push_back(from_float<decltype(of_type)>(static_cast<float>(value)));
      }
      return put(rounded);
    });
  }
  [[nodiscard]] std::vector<double> download(DeviceBytes bytes) const {
    return with_training_type(type, [&](auto of_type) {
      std::vector<double> exact;
      for (const auto value : get(view_as<decltype(of_type)>(bytes))) {
        exact.push_back(to_float(value));
      }
      return exact;
    });
  }
  DeviceView<std::int32_t> upload_tokens(const std::vector<std::int32_t>& tokens) {
    return view_as<std::int32_t>(put(tokens));
  }
  DeviceBytes activation() { return device->allocate(compute->activation_bytes(), "activation"); }
  DeviceView<float> gradient(std::size_t size) {
    return view_as<float>(device->allocate(size * sizeof(float), "gradient"));
  }
  /// Another gradient with these values.
  DeviceView<float> gradient(const std::vector<float>& of) { return view_as<float>(put(of)); }
  DeviceView<double> number() { return view_as<double>(device->allocate(8, "number")); }

  /// The content of device memory after the stream's work is done.
  template <class T>
  [[nodiscard]] std::vector<T> get(DeviceView<T> view) const {
    std::vector<T> found(view.size());
    const auto* const start = reinterpret_cast<const std::byte*>(view.raw());
    device->copy_to_host(*stream, std::as_writable_bytes(std::span(found)),
                         {start, view.size() * sizeof(T)});
    stream->synchronize();
    return found;
  }
  template <class T>
  [[nodiscard]] T one(DeviceView<T> view) const {
    return get(view).at(0);
  }
  [[nodiscard]] std::vector<double> values(DeviceView<float> view) const {
    const std::vector<float> found = get(view);
    return {found.begin(), found.end()};
  }

  /// Flat weights of block `index`, similar to those of a trained model: norms around 1, biases not
  /// 0, padding 0. The values are exact in the training type.
  [[nodiscard]] std::vector<double> weights(std::size_t index) const {
    const model::BlockSpec& block = architecture.blocks[index];
    std::vector<double> flat(block.elements, 0.0);
    for (const model::TensorSpec& tensor : block.tensors) {
      const double mean = tensor.init == model::Init::ones ? 1.0 : 0.0;
      const auto values = normals(tensor.size, 100 + tensor.offset + index, 0.2, mean);
      for (std::size_t i = 0; i < tensor.size; ++i) flat[tensor.offset + i] = exact(values[i]);
    }
    return flat;
  }
  [[nodiscard]] std::vector<double> activation_values(std::uint64_t seed) const {
    auto values = normals(activations(), seed);
    for (double& value : values) value = exact(value);
    return values;
  }
  [[nodiscard]] std::vector<std::int32_t> tokens(std::uint64_t seed) const {
    std::vector<std::int32_t> out(shape.tokens());
    for (std::size_t i = 0; i < out.size(); ++i) {
      out[i] = static_cast<std::int32_t>(random_u64(seed, i) % architecture.config.vocab_size);
    }
    return out;
  }

  /// Kernel::head_train with one tile. `tied` and `tied_gradient` are those of block 0, if it is
  /// tied.
  void train_head(ConstDeviceBytes weights, ConstDeviceBytes tied, ConstDeviceBytes in,
                  DeviceView<const std::int32_t> targets, float scale, DeviceBytes dx,
                  DeviceView<float> gradient, DeviceView<float> tied_gradient,
                  model::Accumulation accumulation, DeviceView<double> loss) const {
    const bool is_tied = architecture.config.tie_embeddings;
    const OutputTile tile = {0, is_tied ? tied : weights, is_tied ? tied_gradient : gradient};
    kernels().head_train(*stream, weights, {&tile, 1}, in, targets, scale, dx, gradient,
                         accumulation, loss);
  }

  model::Architecture architecture;
  model::MicroBatchShape shape;
  DType type;
  std::unique_ptr<device::Device> device;
  std::unique_ptr<device::Stream> stream;
  std::unique_ptr<model::Compute> compute;

 private:
  template <class T>
  DeviceBytes put(const std::vector<T>& values) {
    const DeviceBytes bytes = device->allocate(values.size() * sizeof(T), "test");
    device->copy_to_device(*stream, bytes, std::as_bytes(std::span(values)));
    stream->synchronize();
    return bytes;
  }
  [[nodiscard]] double exact(double value) const {
    return with_training_type(type, [&](auto of_type) {
      return to_float(from_float<decltype(of_type)>(static_cast<float>(value)));
    });
  }
};

}  // namespace ballast::test
