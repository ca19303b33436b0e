#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "ballast/core/dtype.h"
#include "ballast/core/error.h"
#include "ballast/model/block_layout.h"
#include "ballast/model/compute.h"

#include "src/model/compute/expert_exchange.h"
#include "src/model/compute/experts.h"
#include "src/model/compute/factories.h"
#include "src/model/compute/model_layers.h"
#include "src/model/compute/norms_around_experts.h"
#include "src/model/compute/output_head.h"
#include "src/model/compute/pass_rules.h"
#include "src/model/compute/pass_views.h"
#include "src/model/compute/vocabulary_kernels.h"
#include "src/model/ops/device_ops.h"

namespace ballast::model {
namespace {

/// Compute on top of the operations of one device. Operations with a stream parameter enqueue
/// themselves; a WorkQueue runs the others.
template <class T>
class DeviceCompute final : public Compute {
 public:
  /// `ops`: for kernel_extents(model, shape).
  DeviceCompute(const Architecture& model, MicroBatchShape shape, DeviceOps<T> ops)
      : model_(model),
        shape_(shape),
        ops_(std::move(ops)),
        tile_sums_(model_, shape.tokens(), ops_),
        head_(model_, shape, ops_, tile_sums_),
        experts_(model_, shape.tokens(), ops_),
        layers_(model_, attention_shape(config_of_tile(model_.config), shape), ops_) {
    sizes_.rows = std::max<Bytes>({head_.rows_bytes(), experts_.rows_bytes(),
                                   model_.config.layer_tiles > 1 ? activation_bytes() : 0,
                                   layers_.head_norms().rows() * sizeof(T)});
    sizes_.sums =
        std::max<Bytes>(shape_.tokens() * model_.config.hidden_size, layers_.head_norms().sums()) *
        sizeof(float);
    sizes_.experts = experts_.experts();
    sizes_.router_totals = experts_.empty() ? 0 : RouterTotals::values(sizes_.experts);
    sizes_.attention = sizes_.intermediates = std::vector<Bytes>(model_.blocks.size());
    sizes_.intermediates[model_.head()] = round_up(head_.one_pass_bytes(), kPage);
    for (std::size_t b = 0; b < model_.blocks.size(); ++b) {
      const BlockSpec& block = model_.blocks[b];
      cleared_.push_back(cleared_ranges(model_, block));
      sizes_.cleared.push_back(elements_in(cleared_.back()) * sizeof(float));
      largest_block_ = std::max<std::size_t>(largest_block_, block.own_elements());
      if (!is_layer_in_one_piece(block)) continue;
      const std::size_t layer = b - model_.first_layer();
      sizes_.intermediates[b] = round_up(layers_.intermediate_bytes(layer), kPage);
      sizes_.attention[b] = round_up(layers_.attention_bytes(layer), kPage);
    }
    sizes_.workspace = lay_out(nullptr);
  }

  Bytes activation_bytes() const override {
    return shape_.tokens() * model_.config.hidden_size * sizeof(T);
  }
  const KernelSizes& sizes() const override { return sizes_; }
  std::string arithmetic() const override { return ops_.queue->arithmetic(); }
  void set_workspace(DeviceBytes workspace) override {
    expects(workspace.size() >= sizes_.workspace,
            "the workspace is smaller than sizes().workspace");
    lay_out(workspace.raw());
    ready_ = true;
  }

  void run(device::Stream& stream, const Pass& pass, const PassArguments& arguments) override {
    static constexpr auto kKernels = kernels();
    check_.check(pass, arguments);
    (this->*kKernels.at(static_cast<std::size_t>(pass.kernel)))(stream, pass, arguments);
  }

  void clear_gradient(device::Stream& stream, std::size_t block,
                      DeviceView<float> gradient) override {
    const bool sum_rows =
        block < model_.blocks.size() && has_token_sums(model_, model_.blocks[block]);
    expects(block < cleared_.size() &&
                (sum_rows || gradient.size() == model_.blocks[block].own_trained_elements()),
            "clear_gradient: not the accumulators of a block");
    enqueue(stream, [=, this] {
      if (sum_rows) return ops_.elementwise->zero(gradient.raw(), gradient.size());
      for (const ElementRange& range : cleared_[block]) {
        ops_.elementwise->zero(gradient.raw() + range.first, range.count());
      }
    });
  }
  void zero(device::Stream& stream, DeviceView<float> gradient) override {
    ops_.packing->zero(stream, gradient.raw(), gradient.size());
  }
  void pack_gradient(device::Stream& stream, std::size_t block, const GradientSums& sums,
                     DeviceBytes packed, DeviceView<GradientStats> stats) override {
    const std::size_t size = packed.size() / sizeof(T);
    expects(size <= largest_block_ && tables_.suit(block, sums, size),
            "pack_gradient: the sizes do not match");
    auto* const partial = reinterpret_cast<GradientStats*>(scratch_);
    auto* const sum_rows = reinterpret_cast<std::uint32_t*>(partial + chunks_of(size));
    enqueue(stream, [=, this, own = sums.own, tied = sums.tied,
                     batches = std::vector(sums.batches.begin(), sums.batches.end())] {
      const UnpackedGradient from = tables_.find_sum_rows(block, {own, tied, batches}, sum_rows);
      ops_.packing->pack(from, as<T>(packed), size, partial, stats.empty() ? nullptr : stats.raw());
    });
  }

  void measure_gradient(device::Stream& stream, ConstDeviceBytes packed, DeviceBytes scratch,
                        DeviceView<GradientStats> stats) override {
    const std::size_t size = packed.size() / sizeof(T);
    expects(scratch.size() >= chunks_of(size) * sizeof(GradientStats),
            "measure_gradient: the scratch memory is too small");
    ops_.packing->measure(stream, as<T>(packed), size, as<GradientStats>(scratch), stats.raw());
  }

  void quantize_weights(device::Stream& stream, ConstDeviceBytes weights,
                        DeviceBytes codes) override {
    const std::size_t blocks = code_blocks(weights.size(), codes.size());
    ops_.packing->encode(stream, as<T>(weights), blocks, as<std::int8_t>(codes),
                         reinterpret_cast<float*>(codes.raw() + blocks * WeightCodes::kBlock));
  }
  void dequantize_weights(device::Stream& stream, ConstDeviceBytes codes,
                          DeviceBytes weights) override {
    const std::size_t blocks = code_blocks(weights.size(), codes.size());
    ops_.packing->decode(stream, as<std::int8_t>(codes),
                         reinterpret_cast<const float*>(codes.raw() + blocks * WeightCodes::kBlock),
                         blocks, as<T>(weights));
  }

  void decode_block(device::Stream& stream, std::size_t block, ConstDeviceBytes stored,
                    DeviceBytes weights) override {
    const Bytes plain = model_.blocks.at(block).plain_elements() * sizeof(T);
    const BlockCodes codes(model_, model_.blocks[block]);
    expects(stored.size() >= plain + codes.bytes &&
                weights.size() >= model_.blocks[block].elements * sizeof(T),
            "decode_block: too little memory");
    enqueue(stream, [=, this] {
      ops_.elementwise->copy_bytes(stored.raw(), weights.raw(), plain);
      for (const BlockCodes::Matrix& matrix : codes.matrices) {
        ops_.packing->dequantize_base(
            {*model_.quantization, matrix.arrays, stored.raw() + plain + matrix.offset},
            as<T>(weights) + matrix.tensor->offset);
      }
    });
  }

 private:
  using KernelFunction = void (DeviceCompute::*)(device::Stream&, const Pass&,
                                                 const PassArguments&);
  static constexpr std::array<KernelFunction, kKernelCount> kernels() {
    std::array<KernelFunction, kKernelCount> table{};
    const auto set = [&table](Kernel kernel, KernelFunction function) {
      table[static_cast<std::size_t>(kernel)] = function;
    };
    set(Kernel::embed, &DeviceCompute::embed);
    set(Kernel::embed_backward, &DeviceCompute::embed_backward);
    set(Kernel::layer, &DeviceCompute::layer);
    set(Kernel::layer_backward, &DeviceCompute::layer_backward);
    set(Kernel::norm, &DeviceCompute::norm);
    set(Kernel::norm_backward, &DeviceCompute::norm_backward);
    set(Kernel::tile, &DeviceCompute::tile);
    set(Kernel::tile_backward, &DeviceCompute::tile_backward);
    set(Kernel::shared_expert, &DeviceCompute::shared_expert);
    set(Kernel::shared_expert_backward, &DeviceCompute::shared_expert_backward);
    set(Kernel::router, &DeviceCompute::router);
    set(Kernel::router_backward, &DeviceCompute::router_backward);
    set(Kernel::router_losses, &DeviceCompute::router_losses);
    set(Kernel::expert, &DeviceCompute::expert);
    set(Kernel::expert_backward, &DeviceCompute::expert_backward);
    set(Kernel::exchanged_expert, &DeviceCompute::exchanged_expert);
    set(Kernel::exchanged_expert_backward, &DeviceCompute::exchanged_expert_backward);
    set(Kernel::result_norm, &DeviceCompute::result_norm);
    set(Kernel::result_norm_backward, &DeviceCompute::result_norm_backward);
    set(Kernel::head_evaluate, &DeviceCompute::head<&HeadKernels<T>::evaluate>);
    set(Kernel::head_train, &DeviceCompute::head<&HeadKernels<T>::train>);
    set(Kernel::head_scan, &DeviceCompute::head<&HeadKernels<T>::scan>);
    set(Kernel::head_differentiate, &DeviceCompute::head<&HeadKernels<T>::differentiate>);
    set(Kernel::head_end, &DeviceCompute::head<&HeadKernels<T>::end>);
    set(Kernel::head_merge, &DeviceCompute::head<&HeadKernels<T>::merge>);
    return table;
  }

  void embed(device::Stream& stream, const Pass& pass, const PassArguments& args) {
    const auto table = tables_.views(pass.block, as<const T>(args[Port::weights]));
    T* const out = as<T>(args[Port::output]);
    enqueue(stream, [=, this, batch = args.batch] {
      ops_.tokens->check_tokens(batch.tokens.raw(), 0);
      ops_.tokens->embed(table, {batch.tokens.raw(), batch.positions.raw()}, out);
    });
  }
  void embed_backward(device::Stream& stream, const Pass& pass, const PassArguments& args) {
    const auto gradients = tables_.sums(pass.block, view_as<float>(args[Port::gradient]));
    const T* const dy = as<T>(args[Port::activation_gradient]);
    enqueue(stream, [=, this, batch = args.batch] {
      ops_.tokens->check_tokens(batch.tokens.raw(), 0);
      ops_.tokens->embed_backward(tables_.ids_of(batch), dy, gradients, scratch_);
    });
  }

  void layer(device::Stream& stream, const Pass& pass, const PassArguments& args) {
    BlockWeights<T> about = views_.weights_of_layer(pass, args);
    about.dropout = args.scalars.dropout;
    about.role = role_of(pass);
    const LayerSequences sequences = views_.sequences_of(args);
    const T* const in = as<T>(args[Port::input]);
    T* const out = as<T>(args[args[Port::residual].empty() ? Port::output : Port::residual]);
    const KeptValues kept = kept_of(args);
    enqueue(stream, [=, this, &stream, links = views_.links_of(args)] {
      layers_.forward(stream, about, sequences, in, out, kept, links);
    });
  }
  void layer_backward(device::Stream& stream, const Pass& pass, const PassArguments& args) {
    BlockWeights<T> about = views_.weights_of_layer(pass, args);
    about.dropout = args.scalars.dropout;
    const T* const in = as<T>(args[Port::input]);
    T* const dy = as<T>(args[Port::activation_gradient]);
    enqueue(stream, [=, this, &stream, kept = kept_of(args), sequences = views_.sequences_of(args),
                     links = views_.links_of(args)] {
      layers_.backward(stream, about, sequences, in, dy, kept, links);
    });
  }

  void norm(device::Stream& stream, const Pass& pass, const PassArguments& args) {
    const Norm<T> own = weights_of<T>(args)[norm_of_rows(pass.block)];
    const T* const in = as<T>(args[Port::input]);
    T* const normed = as<T>(args[Port::normed]);
    const auto sums = view_as<float>(args[Port::partial_sums]);
    enqueue(stream, [=, this, block = pass.block, all = weights_of<T>(args),
                     residual = args[Port::residual]] {
      ops_.norms->norm(own, in, normed, shape_.tokens());
      if (has_head_norms(block)) layers_.append_head_norms(of_layer(block, all), normed);
      if (!sums.empty()) around_experts_.begin(in, residual, sums.raw());
    });
  }
  void norm_backward(device::Stream& stream, const Pass& pass, const PassArguments& args) {
    const Norm<T> own = weights_of<T>(args)[norm_of_rows(pass.block)];
    const T* const in = as<T>(args[Port::input]);
    const float* const sums = as<float>(args[Port::partial_sums]);
    T* const dy = as<T>(args[Port::activation_gradient]);
    const T* const given = as<const T>(args[Port::normed_gradient]);
    enqueue(stream, [=, this, block = pass.block, all = weights_of<T>(args)] {
      tile_sums_.norm_backward(own, in, given, sums, dy, dy);
      if (has_head_norms(block)) layers_.add_head_norm_gradients(of_layer(block, all), sums);
    });
  }

  void tile(device::Stream& stream, const Pass& pass, const PassArguments& args) {
    const BlockWeights<T> about = views_.weights_of_layer(pass, args);
    const LayerSequences sequences = views_.sequences_of(args);
    const T* const normed = as<T>(args[Port::normed]);
    float* const sums = tile_sums_.part_of(as<float>(args[Port::partial_sums]), pass.number);
    enqueue(stream, [=, this] {
      tile_sums_.add_part(
          sums, false, [&](float* part) { layers_.forward_tile(about, sequences, normed, part); });
    });
    round_sums(stream, args);
  }
  void tile_backward(device::Stream& stream, const Pass& pass, const PassArguments& args) {
    const BlockWeights<T> about = views_.weights_of_layer(pass, args);
    const LayerSequences sequences = views_.sequences_of(args);
    const T* const normed = as<T>(args[Port::normed]);
    const T* const dy = as<T>(args[Port::activation_gradient]);
    float* const sums = tile_sums_.part_of(as<float>(args[Port::partial_sums]), pass.number);
    const bool begins = begins_backward(pass.block);
    const std::size_t norm = norm_of_tile(pass.block);
    float* const slice =
        has_head_norms(norm) ? layers_.head_norms().slice(sums, pass.block - norm - 1) : nullptr;
    enqueue(stream, [=, this] {
      tile_sums_.add_part(sums, begins, [&](float* part) {
        layers_.backward_tile(about, sequences, normed, dy, part, slice);
      });
    });
  }

  void shared_expert(device::Stream& stream, const Pass& pass, const PassArguments& args) {
    const BlockWeights<T> about = weights_of<T>(pass, args);
    std::byte* const rows = args[Port::normed].raw();
    float* const sums = as<float>(args[Port::partial_sums]);
    enqueue(stream,
            [=, this, block = pass.block] { experts_.shared_forward(block, about, rows, sums); });
  }
  void shared_expert_backward(device::Stream& stream, const Pass& pass, const PassArguments& args) {
    BlockWeights<T> about = weights_of<T>(args);
    about.accumulation = args.scalars.accumulation;
    std::byte* const rows = args[Port::normed].raw();
    const T* const dy = as<T>(args[Port::activation_gradient]);
    float* const sums = as<float>(args[Port::partial_sums]);
    enqueue(stream, [=, this, block = pass.block] {
      experts_.shared_backward(block, about, rows, dy, sums);
    });
  }

  void router(device::Stream& stream, const Pass& pass, const PassArguments& args) {
    const bool shared = around_experts_.shares_norm(pass.block);
    if (shared) enqueue(stream, around_experts_.take_norm(args));
    if (!shared) norm(stream, pass, args);
    const BlockWeights<T> about = weights_of<T>(pass, args);
    const auto* const targets = args.batch.targets.raw();
    std::byte* const rows = args[Port::normed].raw();
    auto* const starts = as<std::int32_t>(args[Port::routing]);
    auto* const totals = as<double>(args[Port::router_totals]);
    auto* const losses = as<double>(args[Port::losses]);
    enqueue(stream, [=, this, block = pass.block, moved = args.correction_biases] {
      experts_.route(block, about, moved, targets, rows, starts, totals, losses);
    });
  }
  void router_backward(device::Stream& stream, const Pass& pass, const PassArguments& args) {
    BlockWeights<T> about = weights_of<T>(args);
    about.accumulation = args.scalars.accumulation;
    std::byte* const rows = args[Port::normed].raw();
    auto* const totals = as<double>(args[Port::router_totals]);
    float* const sums = as<float>(args[Port::partial_sums]);
    enqueue(stream, [=, this, block = pass.block, scale = args.scalars.router_gradient] {
      experts_.router_backward(block, about, rows, totals, scale, sums);
    });
    if (!around_experts_.shares_norm(pass.block)) return norm_backward(stream, pass, args);
    enqueue(stream, around_experts_.give_gradient(args));
  }

  void router_losses(device::Stream& stream, const Pass&, const PassArguments& args) {
    const std::vector<double> all =
        choices_of_all(args.all_routing_counts, args.scalars.ranks, sizes_.experts);
    auto* const totals = as<double>(args[Port::router_totals]);
    auto* const losses = as<double>(args[Port::losses]);
    enqueue(stream, [=, this] { experts_.losses_of_step(all, totals, losses); });
  }

  void expert(device::Stream& stream, const Pass& pass, const PassArguments& args) {
    const BlockWeights<T> about = weights_of<T>(pass, args);
    std::byte* const rows = args[Port::normed].raw();
    float* const sums = as<float>(args[Port::partial_sums]);
    const ExpertChoices own = counts_of(args).own(model_.blocks[pass.block], args.scalars.shard);
    enqueue(stream, [=, this, block = pass.block] {
      experts_.forward(block, about, rows, own.first, own.count, sums);
    });
    round_sums(stream, args);
  }
  void expert_backward(device::Stream& stream, const Pass& pass, const PassArguments& args) {
    const BlockWeights<T> about = weights_of<T>(args);
    std::byte* const rows = args[Port::normed].raw();
    const T* const dy = as<T>(args[Port::activation_gradient]);
    float* const sums = as<float>(args[Port::partial_sums]);
    const ExpertChoices own = counts_of(args).own(model_.blocks[pass.block], args.scalars.shard);
    if (begins_backward(pass.block)) clear_sums(stream, args);
    enqueue(stream, [=, this, block = pass.block] {
      experts_.backward(block, about, rows, own.first, own.count, dy, sums);
    });
  }
  void exchanged_expert(device::Stream& stream, const Pass& pass, const PassArguments& args) {
    const SharedChoices all = counts_of(args).shared(model_.blocks[pass.block], args.scalars.shard);
    exchange_rows(stream, *args.exchange)
        .forward(pass.block, weights_of<T>(pass, args), args[Port::normed].raw(), all,
                 as<float>(args[Port::partial_sums]));
    round_sums(stream, args);
  }
  void exchanged_expert_backward(device::Stream& stream, const Pass& pass,
                                 const PassArguments& args) {
    if (begins_backward(pass.block)) clear_sums(stream, args);
    const SharedChoices all = counts_of(args).shared(model_.blocks[pass.block], args.scalars.shard);
    exchange_rows(stream, *args.exchange)
        .backward(pass.block, weights_of<T>(args), args[Port::normed].raw(), all,
                  as<T>(args[Port::activation_gradient]), as<float>(args[Port::partial_sums]));
  }

  void result_norm(device::Stream& stream, const Pass& pass, const PassArguments& args) {
    enqueue(stream, around_experts_.result(weights_of<T>(args)[norm_of_rows(pass.block)], args));
  }
  void result_norm_backward(device::Stream& stream, const Pass& pass, const PassArguments& args) {
    const NormAt norm = norm_of_rows(pass.block);
    enqueue(stream, around_experts_.result_backward(weights_of<T>(args)[norm], args));
  }

  /// A pass of the head, whose work HeadKernels makes.
  template <auto kMake>
  void head(device::Stream& stream, const Pass& pass, const PassArguments& args) {
    enqueue(stream, (head_kernels_.*kMake)(pass, args));
  }

  static std::size_t code_blocks(Bytes weights, Bytes codes) {
    const Elems elements = weights / sizeof(T);
    expects(elements % WeightCodes::kBlock == 0 && codes == WeightCodes::bytes_of(elements),
            "the sizes of weights and codes do not match");
    return elements / WeightCodes::kBlock;
  }

  template <class Work>
  void enqueue(device::Stream& stream, Work work) {
    expects(ready_, "set_workspace() must precede the first kernel");
    ops_.queue->run(stream, std::move(work));
  }
  auto exchange_rows(device::Stream& stream, AllToAll& exchange) {
    return ExpertExchange(experts_, model_.config.hidden_size, stream, exchange,
                          [this, &stream](auto work) { this->enqueue(stream, std::move(work)); });
  }
  /// Writes partial_sums, rounded, to the output of the pass, if it has one.
  void round_sums(device::Stream& stream, const PassArguments& args) {
    if (args[Port::output].empty()) return;
    const float* const sums = as<float>(args[Port::partial_sums]);
    T* const out = as<T>(args[Port::output]);
    enqueue(stream, [=, this] { tile_sums_.round(sums, out); });
  }
  void clear_sums(device::Stream& stream, const PassArguments& args) {
    const std::size_t count = shape_.tokens() * model_.config.hidden_size;
    float* const sums = as<float>(args[Port::partial_sums]);
    enqueue(stream, [=, this] { ops_.elementwise->zero(sums, count); });
  }
  /// Returns whether `block` is the last tile of its half, which runs first in the backward pass.
  [[nodiscard]] bool begins_backward(std::size_t block) const {
    return !model_.is_layer_tile(block + 1);
  }
  /// Returns the block of the norm before a tile.
  [[nodiscard]] std::size_t norm_of_tile(std::size_t block) const {
    while (model_.is_layer_tile(block)) --block;
    return block;
  }
  /// Returns whether `block` is a norm before tiles of attention with norms of heads.
  [[nodiscard]] bool has_head_norms(std::size_t block) const {
    return !layers_.head_norms().empty() && model_.blocks[block].content == BlockContent::norm &&
           model_.blocks[block + 1].content == BlockContent::attention;
  }
  [[nodiscard]] BlockWeights<T> of_layer(std::size_t block, BlockWeights<T> weights) const {
    weights.layer = block - model_.first_layer();
    return weights;
  }
  /// Returns the norm that precedes the tiles of `block`, or follows experts in it.
  [[nodiscard]] NormAt norm_of_rows(std::size_t block) const {
    if (block == model_.head()) return head_kernels_.norm();
    return layers_.norm_of(block - model_.first_layer());
  }
  /// Lays out the workspace from `base` on (null: only counts) and returns its size. Layers, the
  /// head, packing and embeddings share memory, except for the lasting memory of layers.
  std::size_t lay_out(std::byte* base) {
    Bump shared(base);
    ops_.queue->take_memory(shared);
    layers_.take_lasting_memory(shared);
    const std::size_t before = round_up(shared.used(), kPage);
    std::byte* const rest = base == nullptr ? nullptr : base + before;
    Bump layer(rest);
    layers_.take_memory(layer);
    tile_sums_.take_part(layer);
    Bump head(rest);
    tile_sums_.take_memory(head);
    Bump experts = head;
    experts_.take_memory(experts);
    head_.take_memory(head);
    Bump others(rest);
    scratch_ = others.take<std::byte>(
        std::max<std::size_t>(chunks_of(largest_block_) * sizeof(GradientStats) +
                                  tables_.most_rows() * sizeof(std::uint32_t),
                              ops_.tokens->embedding_scratch_bytes()));
    return round_up(before + std::max({layer.used(), head.used(), experts.used(), others.used()}),
                    kPage);
  }

  Architecture model_;
  MicroBatchShape shape_;
  DeviceOps<T> ops_;
  EmbeddingTables<T> tables_{model_, ops_};
  TileSums<T> tile_sums_;
  Head<T> head_;
  HeadKernels<T> head_kernels_{model_, shape_, ops_, head_, tile_sums_};
  Experts<T> experts_;
  NormsAroundExperts<T> around_experts_{model_, shape_.tokens(), ops_, tile_sums_};
  ModelLayers<T> layers_;
  std::size_t largest_block_ = 0;
  std::vector<std::vector<ElementRange>> cleared_;  ///< by block, in ascending order
  KernelSizes sizes_;
  PassCheck check_{model_, kTypeOf<T>, shape_, sizes_};
  PassViews<T> views_{model_, shape_};
  bool ready_ = false;
  std::byte* scratch_ = nullptr;  ///< for packing and embedding
};

}  // namespace

template <class T>
std::unique_ptr<Compute> make_device_compute(const Architecture& model, MicroBatchShape shape,
                                             DeviceOps<T> ops) {
  return std::make_unique<DeviceCompute<T>>(model, shape, std::move(ops));
}

template std::unique_ptr<Compute> make_device_compute(const Architecture&, MicroBatchShape,
                                                      DeviceOps<float>);
template std::unique_ptr<Compute> make_device_compute(const Architecture&, MicroBatchShape,
                                                      DeviceOps<Bf16>);
template std::unique_ptr<Compute> make_device_compute(const Architecture&, MicroBatchShape,
                                                      DeviceOps<F16>);

}  // namespace ballast::model
