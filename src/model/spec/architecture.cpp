#include "ballast/model/architecture.h"

#include <algorithm>
#include <array>
#include <cmath>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/core/suggest.h"
#include "ballast/model/family.h"

#include "src/model/compute/families.h"
#include "src/model/spec/block_steps.h"
#include "src/model/spec/tiles.h"

namespace ballast::model {
namespace {

std::vector<std::unique_ptr<const Family>>& families() {
  static std::vector<std::unique_ptr<const Family>> all = BuiltInFamilies::families();
  return all;
}

void require(std::uint64_t value, const Refuse& refuse, std::string_view key,
             std::string_view what) {
  if (value == 0) refuse(key, fmt::format("missing; give {}", what));
}

void complete_heads(ModelConfig& c, const Refuse& refuse) {
  if (c.num_kv_heads == 0) c.num_kv_heads = c.num_heads;
  if (c.head_dim == 0) {
    if (c.hidden_size % c.num_heads != 0) {
      refuse("num_heads",
             fmt::format("{} does not divide hidden_size {}", c.num_heads, c.hidden_size));
    }
    c.head_dim = c.hidden_size / c.num_heads;
  }
  if (c.num_heads % c.num_kv_heads != 0) {
    refuse("num_kv_heads",
           fmt::format("{} does not divide num_heads {}", c.num_kv_heads, c.num_heads));
  }
}

std::string name_of_tile(const ModelConfig& c, std::string_view name, std::uint64_t tile) {
  return c.vocabulary_tiles == 1 ? std::string(name) : fmt::format("{} {}", name, tile);
}

BlockSpec embedding_block(const ModelConfig& c, const OuterTensors& outer, std::uint64_t tile) {
  BlockBuilder block(BlockKind::embedding, name_of_tile(c, "embedding", tile), "");
  const VocabularyTile own = vocabulary_tile(c, tile);
  // First, because a tied gradient is added to the start of the block's gradient.
  block.add(outer.tokens, {own.rows, c.hidden_size}, Init::normal, c.init_stddev);
  block.rows_of(c.vocab_size, own.first);
  // Last, because a file holds all rows of the tokens before them.
  if (!outer.positions.empty() && tile + 1 == c.vocabulary_tiles) {
    block.add(outer.positions, {c.max_sequence, c.hidden_size}, Init::normal, c.init_stddev);
  }
  return block.finish();
}

BlockSpec head_block(const ModelConfig& c, const OuterTensors& outer, std::uint64_t tile) {
  BlockBuilder block(BlockKind::head, c.tie_embeddings ? "head" : name_of_tile(c, "head", tile),
                     "");
  if (tile == 0) {
    block.add(outer.norm + ".weight", {c.hidden_size},
              outer.norm_offset != 0.0F ? Init::zeros : Init::ones);
    if (outer.norm_has_bias) block.add(outer.norm + ".bias", {c.hidden_size}, Init::zeros);
  }
  std::uint64_t rows = c.vocab_size;
  if (!c.tie_embeddings) {
    const VocabularyTile own = vocabulary_tile(c, tile);
    rows = own.rows;
    block.add(outer.output, {rows, c.hidden_size}, Init::normal, c.init_stddev);
    block.rows_of(c.vocab_size, own.first);
  }
  BlockSpec head = block.finish();
  head.product_elements = rows * c.hidden_size;
  return head;
}

/// `size` elements as a matrix [rows, columns] of equal runs: where element `at` is in the
/// transposed one.
TensorRun transposed_run(Elems size, std::uint64_t rows, std::uint64_t columns, Elems at) {
  const Elems run = size / (rows * columns);
  const std::uint64_t row = at / run / columns;
  const std::uint64_t column = at / run % columns;
  const Elems inside = at % run;
  return {(column * rows + row) * run + inside, run - inside};
}

}  // namespace

BlockBuilder::BlockBuilder(BlockKind kind, std::string name, std::string prefix) {
  block_.kind = kind;
  block_.name = std::move(name);
  block_.prefix = std::move(prefix);
}

BlockBuilder& BlockBuilder::add(std::string_view name, std::vector<std::uint64_t> shape, Init init,
                                double stddev) {
  TensorSpec tensor;
  tensor.name = block_.prefix + std::string(name);
  tensor.size = 1;
  for (const std::uint64_t extent : shape) tensor.size *= extent;
  tensor.shape = std::move(shape);
  tensor.rows_in_all = tensor.shape.front();
  tensor.columns_in_all = tensor.size / tensor.shape.front();
  tensor.offset = block_.elements;
  tensor.init = init;
  tensor.stddev = stddev;
  block_.parameters += tensor.size;
  block_.elements += round_up(tensor.size, kTensorStep);
  if (block_.kind == BlockKind::layer && tensor.shape.size() == 2) {
    block_.product_elements += tensor.size;
  }
  block_.tensors.push_back(std::move(tensor));
  return *this;
}

BlockBuilder& BlockBuilder::add_last_product(std::string_view name,
                                             std::vector<std::uint64_t> shape, double stddev) {
  add(name, std::move(shape), Init::normal, stddev);
  block_.last_product_elements += block_.tensors.back().size;
  return *this;
}

BlockBuilder& BlockBuilder::attend(std::uint64_t width, std::uint64_t window) {
  block_.attention_width = width;
  block_.attention_window = window;
  return *this;
}

BlockBuilder& BlockBuilder::stored_by(const StoredRows& rows, std::uint64_t index) {
  for (auto tensor = block_.tensors.rbegin(); tensor != block_.tensors.rend(); ++tensor) {
    const bool matrix = tensor->shape.size() == 2;
    const std::uint64_t own_rows = tensor->shape.front();
    expects(own_rows % (rows.parts * rows.groups) == 0,
            "the rows of a tensor are not parts of groups");
    tensor->stored = rows;
    tensor->stored.as_columns = rows.as_columns && matrix;
    if (rows.stacked > 0) {
      tensor->rows_in_all = rows.stacked * own_rows;
      tensor->first_row = index * own_rows;
    }
    if (matrix) return *this;
  }
  return *this;
}

BlockBuilder& BlockBuilder::rows_of(std::uint64_t rows_in_all, std::uint64_t first_row) {
  TensorSpec& tensor = block_.tensors.back();
  tensor.rows_in_all = rows_in_all;
  tensor.first_row = first_row;
  return *this;
}

BlockBuilder& BlockBuilder::columns_of(std::uint64_t columns_in_all, std::uint64_t first_column) {
  TensorSpec& tensor = block_.tensors.back();
  expects(tensor.shape.size() == 2, "only matrices have columns");
  tensor.columns_in_all = columns_in_all;
  tensor.first_column = first_column;
  return *this;
}

BlockBuilder& BlockBuilder::part(LayerPart part) {
  block_.part = part;
  return *this;
}

BlockBuilder& BlockBuilder::expert(std::uint64_t number, double token_share) {
  block_.expert = number;
  block_.token_share = token_share;
  return part(LayerPart::expert);
}

BlockSpec BlockBuilder::finish() {
  block_.elements = round_up(block_.elements, kBlockStep);
  return std::move(block_);
}

void add_family(std::unique_ptr<const Family> family) {
  families().push_back(std::move(family));
}

std::vector<std::string> family_names() {
  std::vector<std::string> names;
  for (const auto& one : families()) names.emplace_back(one->name());
  return names;
}

const Family& family(std::string_view name) {
  for (const auto& one : families()) {
    if (one->name() == name) return *one;
  }
  const std::vector<std::string> names = family_names();
  throw Error(ErrorCategory::config,
              fmt::format("model.family: '{}' is not a family; choose one of {}{}", name,
                          listed(names), did_you_mean(name, names)));
}

ModelConfig default_config(std::string_view family_name) {
  const Family& described = family(family_name);
  ModelConfig config;
  config.family = family_name;
  config.tie_embeddings = described.ties_embeddings();
  for (const DetailKey& key : described.details()) config.details[key.name] = key.standard;
  return config;
}

const text::Json& ModelConfig::detail(std::string_view key) const {
  const auto found = details.find(key);
  expects(found != details.end(), "the model config lacks a key of its family");
  return found->second;
}

void complete(ModelConfig& c, const Refuse& refuse, std::uint64_t expert_ranks) {
  const Family& described = family(c.family);
  for (const DetailKey& key : described.details()) c.details.try_emplace(key.name, key.standard);
  require(c.vocab_size, refuse, "vocab_size", "the number of token values");
  require(c.hidden_size, refuse, "hidden_size", "the width of the model");
  require(c.num_layers, refuse, "num_layers", "the number of transformer layers");
  require(c.num_heads, refuse, "num_heads", "the number of attention heads");
  complete_heads(c, refuse);
  if (c.vocab_size > 0x7fffffffU) {
    refuse("vocab_size", fmt::format("{} does not fit 32-bit tokens", c.vocab_size));
  }
  if (!(c.norm_epsilon > 0.0)) refuse("norm_epsilon", "must be above 0");
  if (!(c.init_stddev >= 0.0) || std::isinf(c.init_stddev)) {
    refuse("init_stddev", "must be a finite number, at least 0");
  }
  described.complete(c, refuse);
  require(c.intermediate_size, refuse, "intermediate_size", "the width of the MLP");
  if (!described.outer().positions.empty()) {
    require(c.max_sequence, refuse, "max_sequence", "the number of learned positions");
  }
  complete_tiles(c, expert_ranks, refuse);
}

std::vector<std::uint64_t> TensorSpec::whole_shape() const {
  std::vector<std::uint64_t> whole = shape;
  if (stored.as_columns) std::reverse(whole.begin(), whole.end());
  if (stored.stacked > 0) {
    whole.insert(whole.begin(), stored.stacked);
    return whole;
  }
  if (!stored.as_columns) whole.front() = rows_in_all;
  if (whole.size() > 1) whole.back() = cuts_rows() ? columns_in_all : whole.back();
  return whole;
}

const TensorSpec* BlockSpec::find(std::string_view tensor_name) const {
  for (const TensorSpec& spec : tensors) {
    const std::string_view full = spec.name;
    if (full == tensor_name || full.substr(prefix.size()) == tensor_name) return &spec;
  }
  return nullptr;
}

const TensorSpec& BlockSpec::tensor(std::string_view tensor_name) const {
  if (const TensorSpec* const found = find(tensor_name)) return *found;
  throw Error(ErrorCategory::state,
              fmt::format("block '{}' has no tensor '{}'", name, tensor_name));
}

TensorRun run_in_files(const TensorSpec& tensor, Elems at) {
  if (tensor.cuts_rows()) {
    const Elems columns = tensor.size / tensor.shape.front();
    const Elems row = at / columns;
    const Elems column = at % columns;
    return {tensor.first_element() + row * tensor.columns_in_all + column, columns - column};
  }
  const StoredRows& stored = tensor.stored;
  if (stored.as_columns) {
    const std::uint64_t rows = tensor.shape.front();
    const std::uint64_t columns = tensor.shape.back();
    const Elems row = transposed_run(rows, stored.parts, stored.groups, at / columns).first;
    return {tensor.first_element() + at % columns * rows + row, 1};
  }
  TensorRun run = transposed_run(tensor.size, stored.parts, stored.groups, at);
  run.first += tensor.first_element();
  return run;
}

TensorRun run_in_memory(const TensorSpec& tensor, Elems at) {
  const StoredRows& stored = tensor.stored;
  if (stored.as_columns) {
    const std::uint64_t rows = tensor.shape.front();
    const Elems row = transposed_run(rows, stored.groups, stored.parts, at % rows).first;
    return {row * tensor.shape.back() + at / rows, 1};
  }
  return transposed_run(tensor.size, stored.groups, stored.parts, at);
}

Elems Architecture::parameters() const {
  Elems sum = 0;
  for (const BlockSpec& block : blocks) sum += block.parameters;
  return sum;
}

double Architecture::forward_flops(std::size_t index, std::uint64_t sequences,
                                   std::uint64_t length) const {
  expects(index < blocks.size(), "forward_flops: no such block");
  const BlockSpec& block = blocks[index];
  const auto tokens = static_cast<double>(sequences) * static_cast<double>(length);
  // Two products (scores, weighted values), each over half of length x length; with a window, over
  // a band less its first corner.
  const auto whole = static_cast<double>(length);
  const double window = block.attention_window == 0
                            ? whole
                            : std::min(whole, static_cast<double>(block.attention_window));
  const double pairs_per_token = window - window * window / (2.0 * whole);
  const double attention =
      4.0 * tokens * pairs_per_token * static_cast<double>(block.attention_width);
  return 2.0 * block.token_share * tokens * static_cast<double>(block.product_elements) +
         attention + 2.0 * static_cast<double>(block.norm_product_elements);
}

double Architecture::recomputed_flops(std::size_t index, std::uint64_t sequences,
                                      std::uint64_t length) const {
  expects(index < blocks.size(), "recomputed_flops: no such block");
  const BlockSpec& block = blocks[index];
  if (block.kind != BlockKind::layer) return 0.0;
  const auto tokens = static_cast<double>(sequences) * static_cast<double>(length);
  return forward_flops(index, sequences, length) -
         2.0 * block.token_share * tokens * static_cast<double>(block.last_product_elements);
}

namespace {

/// The sums over the tensors of a block.
constexpr std::array kBlockSums = {&BlockSpec::parameters,
                                   &BlockSpec::elements,
                                   &BlockSpec::frozen_elements,
                                   &BlockSpec::product_elements,
                                   &BlockSpec::last_product_elements,
                                   &BlockSpec::frozen_product_elements};

/// Adds the next expert of the same layer to a block with experts.
void add_expert(BlockSpec& block, const BlockSpec& next) {
  for (TensorSpec tensor : next.tensors) {
    tensor.offset += block.elements;
    block.tensors.push_back(std::move(tensor));
  }
  for (const auto sum : kBlockSums) block.*sum += next.*sum;
  ++block.experts;
  block.name = fmt::format("layer {} experts {}-{}", block.layer, block.expert,
                           block.expert + block.experts - 1);
}

}  // namespace

std::vector<BlockSpec> layer_blocks(const ModelConfig& config, std::uint64_t index,
                                    std::uint64_t expert_ranks) {
  const Family& described = family(config.family);
  const std::uint64_t experts = described.experts_of_layer(config, index);
  if (experts % expert_ranks != 0) {
    throw Error(
        ErrorCategory::config,
        fmt::format("ballast.expert_parallel: {} ranks cannot share {} experts equally; give "
                    "1, with which every rank has all of them",
                    expert_ranks, experts));
  }
  std::vector<BlockSpec> blocks;
  for (BlockSpec& block : described.blocks_of_layer(config, index)) {
    block.layer = index;
    const bool joins = block.part == LayerPart::expert && block.expert % expert_ranks != 0;
    if (joins) {
      add_expert(blocks.back(), block);
    } else {
      blocks.push_back(std::move(block));
    }
  }
  return blocks;
}

Architecture build_architecture(ModelConfig config, std::uint64_t expert_ranks) {
  const auto refuse = [](std::string_view key, const std::string& rule) {
    throw Error(ErrorCategory::config, fmt::format("model.{}: {}", key, rule));
  };
  complete(config, refuse, expert_ranks);
  const OuterTensors outer = family(config.family).outer();
  Architecture model = {.config = std::move(config), .outer = outer, .expert_ranks = expert_ranks};
  const ModelConfig& c = model.config;
  for (std::uint64_t tile = 0; tile < c.vocabulary_tiles; ++tile) {
    model.blocks.push_back(embedding_block(c, model.outer, tile));
  }
  for (std::uint64_t index = 0; index < c.num_layers; ++index) {
    for (BlockSpec& block : layer_blocks(c, index, expert_ranks)) {
      model.blocks.push_back(std::move(block));
    }
  }
  const std::uint64_t heads = c.tie_embeddings ? 1 : c.vocabulary_tiles;
  for (std::uint64_t tile = 0; tile < heads; ++tile) {
    model.blocks.push_back(head_block(c, model.outer, tile));
  }
  std::size_t number = 0;
  bool shares = expert_ranks == 1;
  for (BlockSpec& block : model.blocks) {
    block.number = number;
    number += block.experts;
    shares = shares || block.experts > 1;
  }
  if (shares) return model;
  throw Error(ErrorCategory::config,
              "ballast.expert_parallel: the model has no experts; leave the key out");
}

std::vector<BlockSpec> blocks_without_expert_parallelism(const Architecture& model) {
  std::vector<BlockSpec> blocks;
  for (const BlockSpec& block : model.blocks) {
    const std::size_t tensors = block.tensors.size() / block.experts;
    for (std::uint64_t e = 0; e < block.experts; ++e) {
      BlockSpec& one = blocks.emplace_back(block);
      if (block.experts == 1) continue;
      one.name = fmt::format("layer {} expert {}", block.layer, block.expert + e);
      one.expert += e;
      one.number += e;
      one.experts = 1;
      const auto first = block.tensors.begin() + static_cast<std::ptrdiff_t>(e * tensors);
      one.tensors.assign(first, first + static_cast<std::ptrdiff_t>(tensors));
      for (TensorSpec& tensor : one.tensors) tensor.offset -= e * block.own_elements();
      for (const auto sum : kBlockSums) one.*sum /= block.experts;
    }
  }
  return blocks;
}

}  // namespace ballast::model
