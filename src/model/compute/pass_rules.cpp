#include "src/model/compute/pass_rules.h"

#include <algorithm>
#include <array>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/model/block_layout.h"
#include "ballast/model/kernels.h"

#include "src/model/description/layer_rules.h"

namespace ballast::model {

namespace {

/// Bytes of a batch for the check: the smallest of the parts that it has.
Bytes batch_bytes(const BatchViews& batch) {
  Bytes least = 0;
  for (const auto& part : {batch.tokens, batch.targets, batch.positions}) {
    if (part.empty()) continue;
    const Bytes bytes = part.size() * sizeof(std::int32_t);
    least = least == 0 ? bytes : std::min(least, bytes);
  }
  return least;
}

/// Bytes of an argument. `place`: index if the port has several arguments.
Bytes given(const PassArguments& arguments, Port port, std::size_t place) {
  const auto one_of = [place](const std::vector<DeviceBytes>& several) {
    return place < several.size() ? several[place].size() : 0;
  };
  switch (port) {
    case Port::batch:
      return batch_bytes(arguments.batch);
    case Port::output_weights:
      return one_of(arguments.output_weights);
    case Port::output_gradient:
      return one_of(arguments.output_gradient);
    case Port::routing_counts:
      return arguments.routing_counts.size_bytes();
    case Port::all_routing_counts:
      return place < arguments.all_routing_counts.size()
                 ? arguments.all_routing_counts[place].size_bytes()
                 : 0;
    default:
      return arguments[port].size();
  }
}

[[noreturn]] void refuse(const Pass& pass, std::string_view what) {
  throw Error(ErrorCategory::state,
              fmt::format("{} of block {}: {}", to_string(pass.kernel), pass.block, what));
}

/// Returns the bytes per token of a value that `layer` shares with others.
Bytes bytes_of_links(const Architecture& model, std::uint64_t layer, Port port, DType type) {
  const HeadExtents heads = heads_of(model.layer(layer), model.config);
  const std::uint64_t keys_and_values = 2 * heads.kv_heads * heads.head_dim;
  if (port == Port::keys_values) return keys_and_values * size_of(type);
  if (port == Port::keys_values_gradient) return keys_and_values * sizeof(float);
  const std::uint64_t width = layer_input_width(*model.layers);
  if (port == Port::table_rows_gradient) return width * sizeof(float);
  const Bytes row = width * size_of(type);
  return port == Port::table_rows ? row : model.config.num_layers * row;
}

bool is_head_kernel(Kernel kernel) {
  return kernel == Kernel::head_evaluate || kernel == Kernel::head_train ||
         kernel == Kernel::head_scan || kernel == Kernel::head_differentiate ||
         kernel == Kernel::head_end || kernel == Kernel::head_merge;
}

/// Elements of the gradient sum of a tile of the output matrix.
Elems elements_of_output_sum(const Architecture& model, std::size_t tile) {
  if (model.config.tie_embeddings) return model.tile(tile).rows * model.config.hidden_size;
  return model.blocks[model.tile(tile).block].own_trained_elements();
}

}  // namespace

bool PassCheck::suits(const Pass& pass) const {
  if (pass.block >= model_.blocks.size()) return false;
  const BlockSpec& block = model_.blocks[pass.block];
  const auto is = [&](auto... parts) {
    return block.kind == BlockKind::layer && ((block.content == parts) || ...);
  };
  switch (pass.kernel) {
    case Kernel::embed:
    case Kernel::embed_backward:
      return block.kind == BlockKind::embedding;
    case Kernel::layer:
    case Kernel::layer_backward:
      return is_layer_in_one_piece(block);
    case Kernel::norm:
      return pass.block == model_.head() || is(BlockContent::norm);
    case Kernel::norm_backward:
      return is(BlockContent::norm);
    case Kernel::tile:
    case Kernel::tile_backward:
      return is(BlockContent::attention, BlockContent::mlp);
    case Kernel::shared_expert:
    case Kernel::shared_expert_backward:
      return is(BlockContent::shared_expert);
    case Kernel::router:
    case Kernel::router_backward:
    case Kernel::router_losses:
      return is(BlockContent::router);
    case Kernel::expert:
    case Kernel::expert_backward:
      return is(BlockContent::expert) && block.pieces == 1;
    case Kernel::exchanged_expert:
    case Kernel::exchanged_expert_backward:
      return is(BlockContent::expert) && block.pieces > 1;
    case Kernel::result_norm:
    case Kernel::result_norm_backward:
      return is(BlockContent::result_norm);
    case Kernel::head_evaluate:
    case Kernel::head_train:
    case Kernel::head_end:
    case Kernel::head_merge:
      return pass.block == model_.head();
    case Kernel::head_scan:
    case Kernel::head_differentiate:
      return pass.number < model_.own_vocabulary_tiles() &&
             pass.block == model_.tile(pass.number).block;
    case Kernel::sum_tiles:
    case Kernel::share_row_sums:
      break;  // the engine performs them
  }
  return false;
}

Bytes PassCheck::min_loss_bytes(const Pass& pass) const {
  if (!is_head_kernel(pass.kernel)) return 2 * sizeof(double);
  const auto is_of_pairs = [](const Operand& operand) { return operand.port == Port::pairs; };
  const bool pairs = std::ranges::any_of(pass.operands, is_of_pairs);
  return pairs ? shape_.sequences / 2 * sizeof(PairResult) : sizeof(double);
}

Bytes PassCheck::least(const Pass& pass, Port port, std::size_t tile, std::uint32_t ranks) const {
  const BlockSpec& block = model_.blocks[pass.block];
  const std::uint64_t tokens = shape_.tokens();
  const std::uint64_t width = model_.config.hidden_size;
  const Bytes row_sums = model_.own_vocabulary_tiles() * tokens * kRowSumBytes;
  switch (port) {
    case Port::weights:
      return block.own_elements() * size_of(type_);
    case Port::output_weights:
      return model_.blocks[model_.tile(tile).block].own_elements() * size_of(type_);
    case Port::batch:
      return tokens * sizeof(std::int32_t);
    case Port::input:
    case Port::output:
    case Port::activation_gradient:
    case Port::normed_gradient:
    case Port::residual:
    case Port::result_gradient:
      return tokens * width * size_of(type_);
    case Port::kept:
      return sizes_.intermediates[pass.block];
    case Port::kept_attention:
      return sizes_.attention[pass.block];
    case Port::normed:
      return sizes_.rows;
    case Port::partial_sums:
      return (model_.split.tensor > 1 ? pass.number + 1 : 1) * sizes_.sums;
    case Port::row_sums:
      return row_sums;
    case Port::all_row_sums:
      return model_.split.tensor * round_up(row_sums, kPage);
    case Port::terms:
    case Port::received:   // arguments of the engine
    case Port::workspace:  // set_workspace() has checked it
      return 0;
    case Port::routing:
      return (sizes_.experts + 1) * sizeof(std::int32_t);
    case Port::routing_counts:
    case Port::all_routing_counts:
      return ranks * (sizes_.experts + 1) * sizeof(std::int32_t);
    case Port::router_totals:
      return sizes_.router_totals * sizeof(double);
    case Port::losses:
      return min_loss_bytes(pass);
    case Port::pairs:
      return shape_.sequences * sizeof(double) + tokens * sizeof(float);
    case Port::keys_values:
    case Port::keys_values_gradient:
    case Port::layer_inputs:
    case Port::layer_inputs_gradient:
    case Port::table_rows:
    case Port::table_rows_gradient:
      return tokens * bytes_of_links(model_, block.layer, port, type_);
    case Port::gradient:
      return elements_of_sum(model_, block, tokens) * sizeof(float);
    case Port::output_gradient:
      return elements_of_output_sum(model_, tile) * sizeof(float);
  }
  return 0;
}

void PassCheck::check(const Pass& pass, const PassArguments& arguments) const {
  if (!suits(pass)) refuse(pass, "the kernel does not compute such a block");
  const std::uint32_t ranks = arguments.scalars.ranks;
  if (ranks == 0 || arguments.scalars.shard >= ranks)
    refuse(pass, "the rank is not below the number of ranks");
  // For the whole head, the output matrix is in the head's block if it is neither tied nor in
  // tiles.
  const bool whole = pass.kernel == Kernel::head_evaluate || pass.kernel == Kernel::head_train;
  const bool in_head = !model_.config.tie_embeddings && model_.config.vocabulary_tiles == 1;
  const std::size_t first = !whole ? pass.number : in_head ? 1 : 0;
  std::array<std::size_t, kPortCount> seen{};
  for (const Operand& operand : pass.operands) {
    const std::size_t place = seen[static_cast<std::size_t>(operand.port)]++;
    const Bytes bytes = given(arguments, operand.port, place);
    if (bytes == 0 && operand.optional) continue;
    const std::size_t tile = std::min(first + place, model_.own_vocabulary_tiles() - 1);
    const Bytes needed = least(pass, operand.port, tile, ranks);
    if (bytes == 0 && needed > 0) {
      refuse(pass, fmt::format("the argument for {} is missing", to_string(operand.port)));
    }
    if (bytes < needed) {
      refuse(pass, fmt::format("the argument for {} has {} bytes and needs {}",
                               to_string(operand.port), bytes, needed));
    }
    // Tensors after its end are frozen. Sums by sum rows have no such end.
    const bool exact =
        operand.port == Port::gradient && !has_token_sums(model_, model_.blocks[pass.block]);
    if (exact && bytes > needed) {
      refuse(pass, fmt::format("the argument for {} has {} bytes and needs exactly {}",
                               to_string(operand.port), bytes, needed));
    }
  }
  const bool exchanges =
      pass.kernel == Kernel::exchanged_expert || pass.kernel == Kernel::exchanged_expert_backward;
  if (exchanges && arguments.exchange == nullptr)
    refuse(pass, "the argument for the exchange between ranks is missing");
  const std::size_t biases = arguments.correction_biases.size();
  if (pass.kernel == Kernel::router && biases > 0 && biases != sizes_.experts)
    refuse(pass,
           fmt::format("there are {} correction biases for {} experts", biases, sizes_.experts));
  const bool attends = pass.kernel == Kernel::layer || pass.kernel == Kernel::layer_backward;
  const bool shares = attends && shape_.slices > 1;
  if (shares && arguments.sequence_slice.exchange == nullptr)
    refuse(pass, "the argument for the exchange between ranks that share sequences is missing");
  if (shares && arguments.sequence_slice.number >= shape_.slices)
    refuse(pass, "the slice of the sequences is not below the number of slices");
}

}  // namespace ballast::model
