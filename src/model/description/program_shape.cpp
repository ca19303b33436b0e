#include <algorithm>
#include <map>
#include <tuple>

#include "ballast/core/error.h"
#include "ballast/model/block_layout.h"
#include "ballast/model/kernels.h"

#include "src/model/description/layer_rules.h"
#include "src/model/description/program_draft.h"

namespace ballast::model {
namespace {

BlockRole role_of(const Architecture& model, std::size_t block) {
  const BlockSpec& spec = model.blocks[block];
  if (spec.kind == BlockKind::embedding) return BlockRole::embedding;
  if (spec.kind == BlockKind::head) {
    return block == model.head() ? BlockRole::head : BlockRole::head_tile;
  }
  const auto continues_layer = [&] {
    return model.is_layer_tile(block - 1) && model.blocks[block - 1].layer == spec.layer;
  };
  switch (spec.content) {
    case BlockContent::whole:
    case BlockContent::attention_half:
      break;
    case BlockContent::norm:
      return continues_layer() ? BlockRole::mid_norm : BlockRole::norm;
    case BlockContent::attention:
    case BlockContent::mlp:
      return BlockRole::tile;
    case BlockContent::router:
      return BlockRole::router;
    case BlockContent::shared_expert:
      return BlockRole::shared_expert;
    case BlockContent::expert:
      return model.split.experts > 1 ? BlockRole::exchanged_expert : BlockRole::expert;
    case BlockContent::result_norm:
      return BlockRole::result_norm;
    case BlockContent::layer_embedding:
      return BlockRole::table;
  }
  return BlockRole::layer;
}

/// Numbers blocks so that blocks with the same kernels have the same number: layers, or parts of
/// equal sizes. Vocabulary tiles differ in their sizes.
class Likeness {
 public:
  std::uint32_t number_of(const BlockSpec& block, std::size_t index) {
    const std::uint64_t size = block.kind == BlockKind::layer ? block.elements : index;
    const auto next = static_cast<std::uint32_t>(numbers_.size());
    return numbers_
        .try_emplace(
            {block.kind, block.content, size, block.frozen_elements, block.recurrent_products},
            next)
        .first->second;
  }

 private:
  using Kind = std::tuple<BlockKind, BlockContent, std::uint64_t, Elems, std::uint64_t>;
  std::map<Kind, std::uint32_t> numbers_;
};

Bytes of_block(const std::vector<Bytes>& sizes, const Architecture& model, std::size_t block) {
  expects(sizes.empty() || sizes.size() == model.blocks.size(),
          "step program: the kernel sizes belong to another model");
  return sizes.empty() ? 0 : sizes[block];
}

/// Returns the difference that sequence parallelism makes to attention_flops() of the rank's rows:
/// attention runs over whole sequences, with a part of the heads.
double more_attention(const Architecture& model, std::size_t block, MicroBatchShape batch) {
  if (batch.slices == 1) return 0.0;
  const double whole = model.attention_flops(block, batch.sequences, batch.whole_length());
  return whole / static_cast<double>(batch.slices) -
         model.attention_flops(block, batch.sequences, batch.length);
}

/// Returns the bytes of `columns` values per token that come from other ranks in one exchange of
/// rows against heads.
Bytes exchanged(const BlockSpec& block, DType type, MicroBatchShape batch, std::uint64_t columns) {
  if (block.attention_width == 0) return 0;
  return batch.tokens() * columns * size_of(type) / batch.slices * (batch.slices - 1);
}

/// Returns the bytes of one micro-batch's tokens, targets, sum rows and positions.
Bytes batch_bytes(const StepShape& shape) {
  const std::uint64_t parts = shape.micro_batch.slices;
  const std::uint64_t of_rank = shape.has_positions() ? 4 : 3;
  const std::uint64_t of_all = shape.packed && parts > 1 ? parts : 0;
  return (of_rank + of_all) * shape.micro_batch.tokens() * sizeof(std::int32_t);
}

/// Returns the layer of a block, an empty one if the model has none.
const LayerSpec& layer_of(const Architecture& model, const BlockSpec& block) {
  static const LayerSpec kNone;
  return model.layers->empty() ? kNone : model.layer(block.layer);
}

/// Returns the class of attention's kernels in the layer of `block`, for values of `type`.
AttentionClass attention_class(const Architecture& model, const BlockSpec& block, DType type) {
  if (block.recurrent_products > 0) return AttentionClass::recurrence;
  const LayerSpec& layer = layer_of(model, block);
  const std::uint64_t width = heads_of(layer, model.config).head_dim;
  if (type != DType::bf16 || width > 256) return AttentionClass::plain;
  const auto* const attention = layer.find<AttentionSpec>();
  if (attention != nullptr && attention->cap > 0.0) {
    return width > 128 ? AttentionClass::capped_256 : AttentionClass::capped_128;
  }
  if (width > 192) return AttentionClass::heads_256;
  return width > 128 ? AttentionClass::heads_192 : AttentionClass::heads_128;
}

std::vector<BlockShape> shapes_of_blocks(const Architecture& model, DType type,
                                         const StepShape& step, const KernelSizes& sizes) {
  const MicroBatchShape batch = step.micro_batch;
  Likeness likeness;
  std::vector<BlockShape> blocks;
  blocks.reserve(model.blocks.size());
  for (std::size_t b = 0; b < model.blocks.size(); ++b) {
    const BlockSpec& block = model.blocks[b];
    const double more = more_attention(model, b, batch);
    const HeadExtents own = heads_of(layer_of(model, block), model.config);
    const bool layer = block.kind == BlockKind::layer;
    const bool shares = layer && block.content == BlockContent::whole &&
                        last_reader_of_keys(*model.layers, block.layer) != block.layer;
    const std::uint64_t shared = shares ? batch.tokens() * 2 * own.kv_heads * own.head_dim : 0;
    const std::uint64_t projected = own.heads + 2 * own.kv_heads;
    const Bytes gradient =
        size_of(DType::f32) * elements_of_sum(model, block, step.micro_batches * batch.tokens());
    const std::uint64_t selected = block.content == BlockContent::layer_embedding
                                       ? batch.tokens() * block.tensors.front().shape.back()
                                       : 0;
    const auto dispatched = static_cast<std::uint64_t>(
        std::ceil(block.token_share * static_cast<double>(batch.tokens())));
    blocks.push_back(
        {.name = block.name,
         .role = role_of(model, b),
         .forward_flops = model.forward_flops(b, batch.sequences, batch.length) + more,
         .recomputed_flops = model.recomputed_flops(b, batch.sequences, batch.length) + more,
         .frozen_flops = model.frozen_flops(b, batch.sequences, batch.length),
         .attention_flops = model.attention_flops(b, batch.sequences, batch.length) + more,
         .attention_output_flops =
             model.attention_output_flops(b, batch.sequences, batch.length) + more,
         .exchanged_projections = exchanged(block, type, batch, projected * own.head_dim),
         .exchanged_results = exchanged(block, type, batch, own.heads * own.head_dim),
         .norm_traffic = 2 * block.norm_elements * size_of(type),
         .adapter_traffic = block.adapter_values * (dispatched * size_of(type)),
         .attention = attention_class(model, block, type),
         .intermediates = of_block(sizes.intermediates, model, b),
         .kept_attention = of_block(sizes.attention, model, b),
         .keys_values = shared * size_of(type),
         .keys_values_gradient = shared * size_of(DType::f32),
         .keys_of = layer ? static_cast<std::uint32_t>(keys_of(*model.layers, block.layer)) : 0,
         .selected = selected * size_of(type),
         .row_gradients = block.trained_elements() == 0 ? 0 : selected * sizeof(float),
         .gradient = gradient,
         .cleared = std::min(of_block(sizes.cleared, model, b), gradient),
         .by_token = has_token_sums(model, block),
         .shares_norm = block.content == BlockContent::router &&
                        layer_of(model, block).sublayers.back().reads == Reads::same_norm,
         .token_share = block.token_share,
         .expert = static_cast<std::uint32_t>(block.expert),
         .layer = static_cast<std::uint32_t>(block.layer),
         .alike = likeness.number_of(block, b)});
  }
  return blocks;
}

/// Returns whether a pass needs the gradient of the layer inputs: the embedding is trained, or
/// their projection, which is in the first layer.
bool trains_layer_inputs(const Architecture& model) {
  if (model.first_differentiated() < model.first_layer()) return true;
  const auto& tensors = model.blocks[model.first_layer()].tensors;
  return std::any_of(tensors.begin(), tensors.end(), [&](const TensorSpec& tensor) {
    return !tensor.frozen && !tensor.name.starts_with(model.blocks[model.first_layer()].prefix);
  });
}

Bytes losses_of_head(const StepShape& shape) {
  if (!shape.pairs) return sizeof(double);
  return shape.micro_batch.sequences / 2 * sizeof(PairResult);
}

}  // namespace

std::uint32_t ProgramShape::tiles() const {
  std::uint32_t count = 0;
  while (count < blocks.size() && blocks[count].role == BlockRole::embedding) ++count;
  return count;
}

BlockId ProgramShape::head() const {
  auto head = static_cast<BlockId>(blocks.size());
  while (blocks[--head].role == BlockRole::head_tile) {
  }
  return head;
}

Bytes ProgramShape::sums() const {
  if (tensor == 1) return partial_sums;
  std::uint32_t most = tiles();
  for (BlockId b = first_layer(); b < head(); ++b) {
    if (!continues(b)) most = std::max(most, tiles_of_half(b));
  }
  return most * partial_sums;
}

bool ProgramShape::continues(BlockId block) const {
  switch (blocks[block].role) {
    case BlockRole::embedding:
      return block > 0;
    case BlockRole::layer:
    case BlockRole::norm:
    case BlockRole::mid_norm:
    case BlockRole::router:
    case BlockRole::result_norm:
    case BlockRole::head:
      return false;
    case BlockRole::tile:
    case BlockRole::shared_expert:
    case BlockRole::expert:
    case BlockRole::exchanged_expert:
    case BlockRole::table:
    case BlockRole::head_tile:
      break;
  }
  return true;
}

BlockId ProgramShape::last_of(BlockId block) const {
  while (block + 1 < blocks.size() && continues(block + 1)) ++block;
  return block;
}

BlockId ProgramShape::first_of(BlockId block) const {
  while (continues(block)) --block;
  return block;
}

namespace {

/// Whether the router losses need more choices than those of a micro-batch.
bool spans_step(const ModelConfig& config, const StepShape& shape) {
  const bool parts = shape.micro_batches * shape.ranks > 1;
  return parts && shape.router_losses == RouterLossSpan::step && router_losses(config).any();
}

}  // namespace

ProgramShape shape_of(const Architecture& model, DType type, const StepShape& shape,
                      const KernelSizes& sizes) {
  const std::uint64_t tokens = shape.micro_batch.tokens();
  const std::uint64_t width = model.config.hidden_size;
  ProgramShape program = {
      .blocks = shapes_of_blocks(model, type, shape, sizes),
      .tied = model.config.tie_embeddings,
      .positions = shape.has_positions(),
      .pairs = shape.pairs,
      .first_differentiated = static_cast<BlockId>(model.first_differentiated()),
      .activation = tokens * width * size_of(type),
      .batch = batch_bytes(shape),
      .rows = sizes.rows,
      .partial_sums = std::max(sizes.sums, tokens * width * size_of(DType::f32)),
      .losses = losses_of_head(shape),
      .ranks = shape.ranks,
      .tensor = static_cast<std::uint32_t>(model.split.tensor),
      .sum_scratch = shape.sum_scratch};
  if (const std::uint64_t inputs = layer_input_width(*model.layers); inputs > 0) {
    program.layer_inputs = tokens * model.config.num_layers * inputs * size_of(type);
    program.trains_layer_inputs = trains_layer_inputs(model);
  }
  if (program.tensor > 1) {
    program.row_sums =
        round_up(program.tiles() * tokens * kRowSumBytes, kPage);  // gathers move whole pages
  }
  const TensorSpec* const table = model.blocks.front().find(model.outer.tokens);
  if (program.tied && (table == nullptr || !table->frozen)) {
    program.tied_gradient = model.largest_tile() * width * size_of(DType::f32);
  }
  if (shape.pairs) {
    program.pair_results = shape.micro_batch.sequences * sizeof(double) + tokens * sizeof(float);
  }
  if (sizes.experts > 0) {
    // Gathers between ranks move whole pages.
    program.routing =
        round_up((sizes.experts + 1) * sizeof(std::int32_t), shape.ranks > 1 ? kPage : kCacheLine);
    program.router_totals = sizes.router_totals * sizeof(double);
    program.router_losses = kRouterLosses * sizeof(double);
    program.counts_step = spans_step(model.config, shape);
  }
  return program;
}

}  // namespace ballast::model
