#pragma once

#include <cstring>
#include <memory>
#include <vector>

#include "ballast/core/random.h"
#include "ballast/device/device.h"
#include "ballast/model/compute.h"

#include "tests/unit/model/numbers.h"

namespace ballast::test {

inline model::ModelConfig small_gpt2() {
  model::ModelConfig c;
  c.family = model::Family::gpt2;
  c.vocab_size = 61;
  c.hidden_size = 36;
  c.num_layers = 2;
  c.num_heads = 3;
  c.num_kv_heads = 3;
  c.intermediate_size = 50;
  c.max_sequence = 80;
  return c;
}

/// Groups of three query heads; odd sizes.
inline model::ModelConfig small_llama() {
  model::ModelConfig c;
  c.family = model::Family::llama;
  c.vocab_size = 61;
  c.hidden_size = 36;
  c.num_layers = 2;
  c.num_heads = 6;
  c.num_kv_heads = 2;
  c.intermediate_size = 45;
  c.tie_embeddings = false;
  return c;
}

/// A host device with the kernels of one model and memory to call them with.
struct Bench {
  Bench(const model::ModelConfig& config, DType type, model::MicroBatchShape shape, int threads = 2)
      : architecture(model::build_architecture(config)), shape(shape), type(type) {
    device::DeviceOptions options;
    options.kind = "host";
    options.budget = 1 * kGiB;
    options.compute_threads = threads;
    device = device::make_device(options);
    stream = device->make_stream("compute");
    compute = model::make_compute(*device, architecture, type, shape);
    compute->set_workspace(device->allocate(compute->workspace_bytes(), "workspace"));
  }

  [[nodiscard]] std::size_t activations() const {
    return shape.tokens() * architecture.config.hidden_size;
  }
  /// Values rounded to the training type, in device memory.
  template <class T>
  DeviceBytes upload(const std::vector<T>& values) {
    const DeviceBytes bytes = device->allocate(values.size() * size_of(type), "test");
    for (std::size_t i = 0; i < values.size(); ++i) {
      const auto value = static_cast<float>(values[i]);
      if (type == DType::f32) {
        view_as<float>(bytes).raw()[i] = value;
      } else {
        view_as<Bf16>(bytes).raw()[i] = to_bf16(value);
      }
    }
    return bytes;
  }
  [[nodiscard]] std::vector<double> download(DeviceBytes bytes) const {
    std::vector<double> values(bytes.size() / size_of(type));
    for (std::size_t i = 0; i < values.size(); ++i) {
      values[i] = type == DType::f32 ? static_cast<double>(view_as<float>(bytes).raw()[i])
                                     : static_cast<double>(to_float(view_as<Bf16>(bytes).raw()[i]));
    }
    return values;
  }
  DeviceView<std::int32_t> upload_tokens(const std::vector<std::int32_t>& tokens) {
    const auto view = view_as<std::int32_t>(device->allocate(tokens.size() * 4, "tokens"));
    std::memcpy(view.raw(), tokens.data(), tokens.size() * 4);
    return view;
  }
  DeviceBytes activation() { return device->allocate(compute->activation_bytes(), "activation"); }
  DeviceView<float> gradient(std::size_t size) {
    return view_as<float>(device->allocate(size * sizeof(float), "gradient"));
  }
  DeviceView<double> number() { return view_as<double>(device->allocate(8, "number")); }

  /// Flat weights of block `index` as a trained model might have them: norms around 1, biases not
  /// 0, padding 0; values exact in the training type.
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

  model::Architecture architecture;
  model::MicroBatchShape shape;
  DType type;
  std::unique_ptr<device::Device> device;
  std::unique_ptr<device::Stream> stream;
  std::unique_ptr<model::Compute> compute;

 private:
  [[nodiscard]] double exact(double value) const {
    const auto rounded = static_cast<float>(value);
    return type == DType::f32 ? rounded : to_float(to_bf16(rounded));
  }
};

inline std::vector<double> doubles(DeviceView<float> view) {
  return {view.raw(), view.raw() + view.size()};
}

}  // namespace ballast::test
