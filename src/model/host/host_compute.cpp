#include <algorithm>
#include <cstring>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/device/host_stream.h"

#include "src/model/host/factories.h"
#include "src/model/host/head.h"
#include "src/model/host/layer.h"

namespace ballast::model::host {
namespace {

/// Elements of one partial sum of squares.
/// Columns of the embedding that a thread takes: a cache line of fp32.
constexpr std::size_t kColumns = 16;

device::HostStream& as_host(device::Stream& stream) {
  auto* host = dynamic_cast<device::HostStream*>(&stream);
  expects(host != nullptr, "a stream of another device was given to the host device's kernels");
  return *host;
}

/// Threads of the kernels on `device`'s streams.
std::size_t threads_of(device::Device& device) {
  std::size_t threads = 1;
  const auto stream = device.make_stream("threads");
  as_host(*stream).enqueue([&] { threads = team_size(); });
  stream->synchronize();
  return threads;
}

const KernelTable& best_kernels() {
  const auto tables = kernel_tables();
  expects(!tables.empty(), "no kernels for this CPU");
  return *tables.back();
}

void check_tokens(const std::int32_t* tokens, std::size_t count, std::size_t vocabulary) {
  for (std::size_t i = 0; i < count; ++i) {
    if (tokens[i] >= 0 && static_cast<std::size_t>(tokens[i]) < vocabulary) continue;
    throw Error(ErrorCategory::data,
                fmt::format("token {} of the micro-batch is {}, but model.vocab_size is {}", i,
                            tokens[i], vocabulary));
  }
}

AttentionShape attention_shape(const ModelConfig& config, MicroBatchShape shape) {
  return {shape.sequences, shape.length, config.num_heads, config.num_kv_heads, config.head_size()};
}

std::size_t widest_sum(const ModelConfig& config) {
  return std::max({config.hidden_size * 3, config.intermediate_size});
}

template <class T>
class HostCompute final : public Compute {
 public:
  HostCompute(const Architecture& model, MicroBatchShape shape, std::size_t threads)
      : model_(model),
        shape_(shape),
        width_(model.config.hidden_size),
        kernels_(best_kernels()),
        ops_(rows_of<T>(kernels_), width_, widest_sum(model.config), threads,
             static_cast<float>(model.config.norm_epsilon)),
        head_(model_.config, shape.tokens(), ops_) {
    const AttentionShape attention = attention_shape(model_.config, shape);
    if (model_.config.family == Family::gpt2) {
      layer_ = std::make_unique<Gpt2Layer<T>>(model_.config, attention, ops_);
    } else {
      layer_ = std::make_unique<LlamaLayer<T>>(model_.config, attention, ops_);
    }
    for (const BlockSpec& block : model_.blocks) {
      largest_block_ = std::max<std::size_t>(largest_block_, block.elements);
    }
    workspace_bytes_ = lay_out(nullptr);
  }

  Bytes activation_bytes() const override { return shape_.tokens() * width_ * sizeof(T); }
  Bytes workspace_bytes() const override { return workspace_bytes_; }
  void set_workspace(DeviceBytes workspace) override {
    expects(workspace.size() >= workspace_bytes_,
            "the workspace is smaller than workspace_bytes()");
    lay_out(workspace.raw());
    ready_ = true;
  }

  void embedding_forward(device::Stream& stream, ConstDeviceBytes weights,
                         DeviceView<const std::int32_t> tokens, DeviceBytes out) override {
    run(stream, [=, this] { embed(as<T>(weights), tokens.raw(), as<T>(out)); });
  }
  void embedding_backward(device::Stream& stream, DeviceView<const std::int32_t> tokens,
                          ConstDeviceBytes dy, DeviceView<float> gradient) override {
    run(stream, [=, this] { embed_backward(tokens.raw(), as<T>(dy), gradient.raw()); });
  }
  void layer_forward(device::Stream& stream, std::size_t block, ConstDeviceBytes weights,
                     ConstDeviceBytes in, DeviceBytes out) override {
    expect_layer(block);
    run(stream, [=, this] {
      layer_->forward({model_.blocks[block], as<T>(weights), nullptr}, as<T>(in), as<T>(out));
    });
  }
  void layer_backward(device::Stream& stream, std::size_t block, ConstDeviceBytes weights,
                      ConstDeviceBytes in, DeviceBytes dy, DeviceView<float> gradient) override {
    expect_layer(block);
    run(stream, [=, this] {
      layer_->backward({model_.blocks[block], as<T>(weights), gradient.raw()}, as<T>(in),
                       as<T>(dy));
    });
  }
  void head_forward(device::Stream& stream, ConstDeviceBytes weights, ConstDeviceBytes tied_weights,
                    ConstDeviceBytes in, DeviceView<const std::int32_t> targets,
                    DeviceView<double> loss_sum) override {
    run(stream, [=, this] {
      check_tokens(targets.raw(), shape_.tokens(), model_.config.vocab_size);
      const BlockWeights<T> block(model_.blocks.back(), as<T>(weights), nullptr);
      *loss_sum.raw() = head_.forward(final_norm(block), output(block, tied_weights).weight,
                                      as<T>(in), targets.raw());
    });
  }
  void head_train(device::Stream& stream, ConstDeviceBytes weights, ConstDeviceBytes tied_weights,
                  ConstDeviceBytes in, DeviceView<const std::int32_t> targets, float gradient_scale,
                  DeviceBytes dx, DeviceView<float> gradient, DeviceView<float> tied_gradient,
                  DeviceView<double> loss_sum) override {
    run(stream, [=, this] {
      check_tokens(targets.raw(), shape_.tokens(), model_.config.vocab_size);
      const BlockWeights<T> block(model_.blocks.back(), as<T>(weights), gradient.raw());
      Linear<T> matrix = output(block, tied_weights);
      if (tied()) matrix.weight_gradient = tied_gradient.raw();
      *loss_sum.raw() = head_.train(final_norm(block), matrix.weight, matrix.weight_gradient,
                                    as<T>(in), targets.raw(), gradient_scale, as<T>(dx));
    });
  }
  void zero(device::Stream& stream, DeviceView<float> gradient) override {
    run(stream, [=] {
      split(gradient.size(), kPage / sizeof(float),
            [&](Range r) { std::memset(gradient.raw() + r.begin, 0, r.size() * sizeof(float)); });
    });
  }
  void pack_gradient(device::Stream& stream, DeviceView<const float> gradient,
                     DeviceView<const float> tied, DeviceBytes packed,
                     DeviceView<GradientStats> stats) override {
    expects(gradient.size() <= largest_block_ && tied.size() <= gradient.size() &&
                packed.size() == gradient.size() * sizeof(T),
            "pack_gradient: sizes do not belong together");
    run(stream, [=, this] {
      const GradientStats found = pack(gradient, tied, as<T>(packed));
      if (!stats.empty()) *stats.raw() = found;
    });
  }

  void measure_gradient(device::Stream& stream, ConstDeviceBytes packed, DeviceBytes scratch,
                        DeviceView<GradientStats> stats) override {
    const std::size_t size = packed.size() / sizeof(T);
    expects(scratch.size() >= (size + kStatsChunk - 1) / kStatsChunk * sizeof(GradientStats),
            "measure_gradient: not enough scratch");
    as_host(stream).enqueue([=, this] {
      const auto measure = gradients_of<T>(kernels_).measure;
      *stats.raw() = by_chunks(size, as<GradientStats>(scratch), [&](Range range, auto& found) {
        measure(as<T>(packed) + range.begin, range.size(), &found.sum_of_squares,
                &found.non_finite);
      });
    });
  }

  void encode_weights(device::Stream& stream, ConstDeviceBytes weights,
                      DeviceBytes codes) override {
    const std::size_t blocks = code_blocks(weights.size(), codes.size());
    as_host(stream).enqueue([=, this] {
      auto* const scales = reinterpret_cast<float*>(codes.raw() + blocks * kCodeBlock);
      split(blocks, 1, [&](Range range) {
        const std::size_t at = range.begin * kCodeBlock;
        codes_of<T>(kernels_).encode(as<T>(weights) + at, range.size(), as<std::int8_t>(codes) + at,
                                     scales + range.begin);
      });
    });
  }
  void decode_weights(device::Stream& stream, ConstDeviceBytes codes,
                      DeviceBytes weights) override {
    const std::size_t blocks = code_blocks(weights.size(), codes.size());
    as_host(stream).enqueue([=, this] {
      const auto* const scales = reinterpret_cast<const float*>(codes.raw() + blocks * kCodeBlock);
      split(blocks, 1, [&](Range range) {
        const std::size_t at = range.begin * kCodeBlock;
        codes_of<T>(kernels_).decode(as<std::int8_t>(codes) + at, scales + range.begin,
                                     range.size(), as<T>(weights) + at);
      });
    });
  }

 private:
  /// Of weights and codes that belong together.
  static std::size_t code_blocks(Bytes weights, Bytes codes) {
    const Elems elements = weights / sizeof(T);
    expects(elements % kCodeBlock == 0 && codes == WeightCodes::bytes_of(elements),
            "weights and the place for their codes do not fit together");
    return elements / kCodeBlock;
  }

  template <class U>
  static U* as(DeviceBytes bytes) {
    return view_as<U>(bytes).raw();
  }
  template <class U>
  static const U* as(ConstDeviceBytes bytes) {
    return view_as<U>(bytes).raw();
  }

  template <class Work>
  void run(device::Stream& stream, Work work) {
    expects(ready_, "set_workspace() comes before the first kernel");
    as_host(stream).enqueue(std::move(work));
  }
  void expect_layer(std::size_t block) const {
    expects(block >= 1 && block <= model_.config.num_layers, "no such layer");
  }
  [[nodiscard]] bool tied() const { return model_.config.tie_embeddings; }
  [[nodiscard]] bool gpt2() const { return model_.config.family == Family::gpt2; }
  [[nodiscard]] Norm<T> final_norm(const BlockWeights<T>& block) const {
    return block.norm(0, gpt2());
  }
  /// The output matrix is the last tensor of the head, or the first of the embedding.
  [[nodiscard]] Linear<T> output(const BlockWeights<T>& block,
                                 ConstDeviceBytes tied_weights) const {
    if (!tied()) return block.linear(model_.blocks.back().tensors.size() - 1);
    Linear<T> matrix;
    matrix.weight = as<T>(tied_weights);
    return matrix;
  }

  /// Places everything in `base` (null: only counts) and returns the bytes used. A layer, the head
  /// and a pack never need their memory at the same time.
  std::size_t lay_out(std::byte* base) {
    Bump shared(base);
    ops_.set_sums(shared.take<float>(ops_.sum_floats()));
    std::byte* const rest = base == nullptr ? nullptr : base + shared.used();
    Bump layer(rest);
    layer_->take_memory(layer);
    Bump head(rest);
    head_.take_memory(head);
    Bump pack(rest);
    partial_ = pack.take<GradientStats>((largest_block_ + kStatsChunk - 1) / kStatsChunk);
    return round_up(shared.used() + std::max({layer.used(), head.used(), pack.used()}), kPage);
  }

  void embed(const T* weights, const std::int32_t* tokens, T* out) const {
    check_tokens(tokens, shape_.tokens(), model_.config.vocab_size);
    const T* const positions = gpt2() ? weights + model_.blocks[0].tensors[1].offset : nullptr;
    const auto& kernels = ops_.kernels();
    split(shape_.tokens(), 1, [&](Range rows) {
      for (std::size_t i = rows.begin; i < rows.end; ++i) {
        const T* const row = weights + static_cast<std::size_t>(tokens[i]) * width_;
        if (positions == nullptr) {
          std::memcpy(out + i * width_, row, width_ * sizeof(T));
        } else {
          kernels.add(row, positions + i % shape_.length * width_, out + i * width_, width_);
        }
      }
    });
  }

  /// Threads share the columns, so that each sum runs in token order.
  void embed_backward(const std::int32_t* tokens, const T* dy, float* gradient) const {
    check_tokens(tokens, shape_.tokens(), model_.config.vocab_size);
    float* const positions = gpt2() ? gradient + model_.blocks[0].tensors[1].offset : nullptr;
    const auto& kernels = ops_.kernels();
    split(width_, kColumns, [&](Range columns) {
      for (std::size_t i = 0; i < shape_.tokens(); ++i) {
        const T* const from = dy + i * width_ + columns.begin;
        const std::size_t row = static_cast<std::size_t>(tokens[i]) * width_;
        kernels.accumulate(gradient + row + columns.begin, from, columns.size());
        if (positions == nullptr) continue;
        kernels.accumulate(positions + i % shape_.length * width_ + columns.begin, from,
                           columns.size());
      }
    });
  }

  GradientStats pack(DeviceView<const float> gradient, DeviceView<const float> tied, T* packed) {
    return by_chunks(gradient.size(), partial_, [&](Range range, GradientStats& stats) {
      pack_range(gradient, tied, packed, range, stats);
    });
  }

  /// Calls find(range, statistics) for each chunk of `size` values and adds up what it found.
  template <class Find>
  static GradientStats by_chunks(std::size_t size, GradientStats* partial, const Find& find) {
    const std::size_t chunks = (size + kStatsChunk - 1) / kStatsChunk;
    split(chunks, 1, [&](Range here) {
      for (std::size_t chunk = here.begin; chunk < here.end; ++chunk) {
        const std::size_t begin = chunk * kStatsChunk;
        partial[chunk] = {};
        find(Range{begin, std::min(size, begin + kStatsChunk)}, partial[chunk]);
      }
    });
    GradientStats total;
    for (std::size_t chunk = 0; chunk < chunks; ++chunk) {
      total.sum_of_squares += partial[chunk].sum_of_squares;
      total.non_finite += partial[chunk].non_finite;
    }
    return total;
  }

  /// The part of the range that the tied gradient covers, then the rest.
  void pack_range(DeviceView<const float> gradient, DeviceView<const float> tied, T* packed,
                  Range range, GradientStats& stats) const {
    const auto pack = gradients_of<T>(kernels_).pack;
    const std::size_t border = std::clamp(tied.size(), range.begin, range.end);
    if (border > range.begin) {
      pack(gradient.raw() + range.begin, tied.raw() + range.begin, packed + range.begin,
           border - range.begin, &stats.sum_of_squares, &stats.non_finite);
    }
    if (border < range.end) {
      pack(gradient.raw() + border, nullptr, packed + border, range.end - border,
           &stats.sum_of_squares, &stats.non_finite);
    }
  }

  Architecture model_;
  MicroBatchShape shape_;
  std::size_t width_;
  const KernelTable& kernels_;
  Ops<T> ops_;
  Head<T> head_;
  std::unique_ptr<Layer<T>> layer_;
  std::size_t largest_block_ = 0;
  Bytes workspace_bytes_ = 0;
  bool ready_ = false;
  GradientStats* partial_ = nullptr;
};

std::unique_ptr<Compute> make_with_threads(const Architecture& model, DType type,
                                           MicroBatchShape shape, std::size_t threads) {
  if (type == DType::f32) return std::make_unique<HostCompute<float>>(model, shape, threads);
  return std::make_unique<HostCompute<Bf16>>(model, shape, threads);
}

}  // namespace

std::unique_ptr<Compute> make_host_compute(device::Device& device, const Architecture& model,
                                           DType type, MicroBatchShape shape) {
  return make_with_threads(model, type, shape, threads_of(device));
}

Bytes host_workspace_bytes(const Architecture& model, DType type, MicroBatchShape shape,
                           std::size_t threads) {
  return make_with_threads(model, type, shape, threads)->workspace_bytes();
}

}  // namespace ballast::model::host
