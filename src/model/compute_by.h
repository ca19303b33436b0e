#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "ballast/core/error.h"
#include "ballast/core/weight_codes.h"
#include "ballast/model/compute.h"

#include "src/model/families.h"
#include "src/model/head.h"

namespace ballast::model {

/// Compute with the operations of one device (layer.h). `Ops::run(stream, work)` runs or enqueues
/// work that calls operations; operations with a stream parameter enqueue themselves.
template <class Ops>
class ComputeBy final : public Compute {
 public:
  using T = typename Ops::Value;

  /// `about_ops`: further constructor arguments of Ops.
  template <class... AboutOps>
  ComputeBy(const Architecture& model, MicroBatchShape shape, AboutOps&&... about_ops)
      : model_(model),
        shape_(shape),
        ops_(model_.config, shape, std::forward<AboutOps>(about_ops)...),
        head_(model_.config, shape.tokens(), ops_),
        layer_(make_layer(model_, attention_shape(model_.config, shape), ops_)),
        final_norm_(find_norm(model_.blocks.back(), model_.outer.norm, model_.outer.norm_offset)),
        token_table_(model_.blocks.front().tensor(model_.outer.tokens).offset) {
    if (const auto& name = model_.outer.positions; !name.empty()) {
      position_table_ = model_.blocks.front().tensor(name).offset;
    }
    if (model_.outer.scales_tokens) {
      expects(!position_table_, "an embedding with positions is not scaled");
      token_scale_ = rounded(std::sqrt(static_cast<double>(model_.config.hidden_size)));
    }
    if (!tied()) output_ = model_.blocks.back().tensor(model_.outer.output).offset;
    memory_.intermediates.resize(model_.blocks.size());
    for (std::size_t b = 0; b < model_.blocks.size(); ++b) {
      const BlockSpec& block = model_.blocks[b];
      cleared_.push_back(cleared_ranges(block));
      memory_.cleared.push_back(elements_in(cleared_.back()) * sizeof(float));
      largest_block_ = std::max<std::size_t>(largest_block_, block.elements);
      if (block.kind != BlockKind::layer) continue;
      memory_.intermediates[b] = round_up(layer_->intermediate_bytes(), kPage);
    }
    memory_.workspace = lay_out(nullptr);
  }

  Bytes activation_bytes() const override {
    return shape_.tokens() * model_.config.hidden_size * sizeof(T);
  }
  const KernelMemory& memory() const override { return memory_; }
  void set_workspace(DeviceBytes workspace) override {
    expects(workspace.size() >= memory_.workspace,
            "the workspace is smaller than memory().workspace");
    lay_out(workspace.raw());
    ready_ = true;
  }

  void embedding_forward(device::Stream& stream, ConstDeviceBytes weights,
                         DeviceView<const std::int32_t> tokens,
                         DeviceView<const std::int32_t> positions, DeviceBytes out) override {
    run(stream, [=, this] {
      ops_.check_tokens(tokens.raw(), 0);
      ops_.embed(tables<const T>(as<T>(weights)), {tokens.raw(), positions.raw()}, as<T>(out));
    });
  }
  void embedding_backward(device::Stream& stream, DeviceView<const std::int32_t> tokens,
                          DeviceView<const std::int32_t> positions, ConstDeviceBytes dy,
                          DeviceView<float> gradient) override {
    run(stream, [=, this] {
      ops_.check_tokens(tokens.raw(), 0);
      ops_.embed_backward({tokens.raw(), positions.raw()}, as<T>(dy), tables<float>(gradient.raw()),
                          scratch_);
    });
  }
  void layer_forward(device::Stream& stream, std::size_t block, ConstDeviceBytes weights,
                     DeviceView<const std::int32_t> positions, ConstDeviceBytes in, DeviceBytes out,
                     DeviceBytes kept) override {
    expect_layer(block, kept);
    run(stream, [=, this] {
      layer_->forward({block - 1, as<T>(weights), nullptr}, positions.raw(), as<T>(in), as<T>(out),
                      kept.raw());
    });
  }
  void layer_backward(device::Stream& stream, std::size_t block, ConstDeviceBytes weights,
                      DeviceView<const std::int32_t> positions, ConstDeviceBytes in, DeviceBytes dy,
                      DeviceView<float> gradient, Accumulation accumulation,
                      DeviceBytes kept) override {
    expect_layer(block, kept);
    run(stream, [=, this] {
      layer_->backward({block - 1, as<T>(weights), gradient.raw(), accumulation}, positions.raw(),
                       as<T>(in), as<T>(dy), kept.raw());
    });
  }
  void head_forward(device::Stream& stream, ConstDeviceBytes weights, ConstDeviceBytes tied_weights,
                    ConstDeviceBytes in, DeviceView<const std::int32_t> targets,
                    DeviceView<double> loss_sum) override {
    run(stream, [=, this] {
      ops_.check_tokens(targets.raw(), kLeastTarget);
      const BlockWeights<T> block{.weights = as<T>(weights)};
      head_.forward(block[final_norm_], output_matrix(weights, tied_weights), as<T>(in),
                    targets.raw(), loss_sum.raw());
    });
  }
  void head_train(device::Stream& stream, ConstDeviceBytes weights, ConstDeviceBytes tied_weights,
                  ConstDeviceBytes in, DeviceView<const std::int32_t> targets, float gradient_scale,
                  DeviceBytes dx, DeviceView<float> gradient, DeviceView<float> tied_gradient,
                  Accumulation accumulation, DeviceView<double> loss_sum) override {
    run(stream, [=, this] {
      ops_.check_tokens(targets.raw(), kLeastTarget);
      const BlockWeights<T> block{.weights = as<T>(weights), .gradient = gradient.raw()};
      float* const output_gradient = tied() ? tied_gradient.raw() : gradient.raw() + output_;
      head_.train(block[final_norm_], output_matrix(weights, tied_weights), output_gradient,
                  accumulation, as<T>(in), targets.raw(), gradient_scale, as<T>(dx),
                  loss_sum.raw());
    });
  }
  void clear_gradient(device::Stream& stream, std::size_t block,
                      DeviceView<float> gradient) override {
    expects(block < cleared_.size() && gradient.size() == model_.blocks[block].elements,
            "clear_gradient: not the accumulators of a block");
    run(stream, [=, this] {
      for (const ElementRange& range : cleared_[block]) {
        ops_.zero(gradient.raw() + range.first, range.count);
      }
    });
  }
  void zero(device::Stream& stream, DeviceView<float> gradient) override {
    run(stream, [=, this] { ops_.zero(gradient.raw(), gradient.size()); });
  }
  void pack_gradient(device::Stream& stream, DeviceView<const float> gradient,
                     DeviceView<const float> tied, DeviceBytes packed,
                     DeviceView<GradientStats> stats) override {
    expects(gradient.size() <= largest_block_ && tied.size() <= gradient.size() &&
                packed.size() == gradient.size() * sizeof(T),
            "pack_gradient: the sizes do not match");
    run(stream, [=, this] {
      ops_.pack(gradient.raw(), tied.raw(), tied.size(), as<T>(packed), gradient.size(),
                reinterpret_cast<GradientStats*>(scratch_), stats.empty() ? nullptr : stats.raw());
    });
  }

  void measure_gradient(device::Stream& stream, ConstDeviceBytes packed, DeviceBytes scratch,
                        DeviceView<GradientStats> stats) override {
    const std::size_t size = packed.size() / sizeof(T);
    expects(scratch.size() >= chunks_of(size) * sizeof(GradientStats),
            "measure_gradient: the scratch memory is too small");
    ops_.measure(stream, as<T>(packed), size, as<GradientStats>(scratch), stats.raw());
  }

  void encode_weights(device::Stream& stream, ConstDeviceBytes weights,
                      DeviceBytes codes) override {
    const std::size_t blocks = code_blocks(weights.size(), codes.size());
    ops_.encode(stream, as<T>(weights), blocks, as<std::int8_t>(codes),
                reinterpret_cast<float*>(codes.raw() + blocks * WeightCodes::kBlock));
  }
  void decode_weights(device::Stream& stream, ConstDeviceBytes codes,
                      DeviceBytes weights) override {
    const std::size_t blocks = code_blocks(weights.size(), codes.size());
    ops_.decode(stream, as<std::int8_t>(codes),
                reinterpret_cast<const float*>(codes.raw() + blocks * WeightCodes::kBlock), blocks,
                as<T>(weights));
  }

 private:
  /// Negative targets are valid.
  static constexpr std::int32_t kLeastTarget = std::numeric_limits<std::int32_t>::min();

  struct ElementRange {
    Elems first = 0;
    Elems count = 0;
  };
  static Elems elements_in(const std::vector<ElementRange>& ranges) {
    Elems sum = 0;
    for (const ElementRange& range : ranges) sum += range.count;
    return sum;
  }
  /// Whether one product of a backward pass makes the whole gradient of `tensor`.
  [[nodiscard]] bool is_overwritten(const BlockSpec& block, const TensorSpec& tensor) const {
    if (block.kind == BlockKind::layer) return tensor.shape.size() == 2;
    return block.kind == BlockKind::head && !tied() && tensor.offset == output_;
  }
  /// What is not overwritten, padding included.
  [[nodiscard]] std::vector<ElementRange> cleared_ranges(const BlockSpec& block) const {
    std::vector<ElementRange> ranges;
    Elems done = 0;
    const auto clear_until = [&](Elems end) {
      if (end > done) ranges.push_back({done, end - done});
    };
    for (const TensorSpec& tensor : block.tensors) {
      if (!is_overwritten(block, tensor)) continue;
      clear_until(tensor.offset);
      done = tensor.offset + tensor.size;
    }
    clear_until(block.elements);
    return ranges;
  }

  static std::size_t code_blocks(Bytes weights, Bytes codes) {
    const Elems elements = weights / sizeof(T);
    expects(elements % WeightCodes::kBlock == 0 && codes == WeightCodes::bytes_of(elements),
            "the sizes of weights and codes do not match");
    return elements / WeightCodes::kBlock;
  }
  static std::size_t chunks_of(std::size_t values) {
    return (values + kStatsChunk - 1) / kStatsChunk;
  }

  /// To the training type.
  static float rounded(double value) {
    const auto narrow = static_cast<float>(value);
    if constexpr (kTypeOf<T> == DType::bf16) return to_float(to_bf16(narrow));
    return narrow;
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
    expects(ready_, "set_workspace() must precede the first kernel");
    ops_.run(stream, std::move(work));
  }
  void expect_layer(std::size_t block, DeviceBytes kept) const {
    expects(block >= 1 && block <= model_.config.num_layers, "the block is not a layer");
    expects(kept.empty() || kept.size() >= memory_.intermediates[block],
            "the memory for intermediates is smaller than memory().intermediates");
  }
  /// The embedding's tables in the flat values of its block.
  template <class U>
  [[nodiscard]] Embedding<U> tables(U* block) const {
    return {block + token_table_, position_table_ ? block + *position_table_ : nullptr,
            token_scale_};
  }
  [[nodiscard]] bool tied() const { return model_.config.tie_embeddings; }
  /// [V, H], of the head or of the embedding.
  [[nodiscard]] const T* output_matrix(ConstDeviceBytes weights,
                                       ConstDeviceBytes tied_weights) const {
    return tied() ? as<T>(tied_weights) + token_table_ : as<T>(weights) + output_;
  }

  /// Lays out the workspace from `base` on (null: only counts) and returns its bytes. Layers, the
  /// head, packs and embeddings use the same memory, except for a layer's lasting memory.
  std::size_t lay_out(std::byte* base) {
    Bump shared(base);
    ops_.take_memory(shared);
    layer_->take_lasting_memory(shared);
    const std::size_t before = round_up(shared.used(), kPage);
    std::byte* const rest = base == nullptr ? nullptr : base + before;
    Bump layer(rest);
    layer_->take_memory(layer);
    Bump head(rest);
    head_.take_memory(head);
    Bump others(rest);
    scratch_ = others.take<std::byte>(std::max<std::size_t>(
        chunks_of(largest_block_) * sizeof(GradientStats), ops_.embedding_scratch_bytes()));
    return round_up(before + std::max({layer.used(), head.used(), others.used()}), kPage);
  }

  Architecture model_;
  MicroBatchShape shape_;
  Ops ops_;
  Head<Ops> head_;
  std::unique_ptr<Layer<Ops>> layer_;
  // Offsets of tensors in their blocks (elements).
  NormAt final_norm_;
  Elems token_table_;
  std::optional<Elems> position_table_;
  float token_scale_ = 1.0F;  ///< a value of the training type
  Elems output_ = 0;          ///< of the head, unless tied
  std::size_t largest_block_ = 0;
  std::vector<std::vector<ElementRange>> cleared_;  ///< by block, in ascending order
  KernelMemory memory_;
  bool ready_ = false;
  std::byte* scratch_ = nullptr;  ///< for packing and embedding
};

}  // namespace ballast::model
