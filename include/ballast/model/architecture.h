#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ballast/core/units.h"
#include "ballast/model/lora.h"
#include "ballast/text/json.h"

namespace ballast::model {

/// Returns the name of the first registered family.
std::string default_family();

/// The `model` section of a config. Keys have Hugging Face's names, or similar ones. complete()
/// replaces each 0 by its default.
struct ModelConfig {
  std::string family = default_family();  ///< a registered family (family.h)
  std::uint64_t vocab_size = 256;
  std::uint64_t hidden_size = 0;
  std::uint64_t num_layers = 0;
  std::uint64_t num_heads = 0;
  std::uint64_t num_kv_heads = 0;       ///< heads of keys and values; 0: num_heads
  std::uint64_t head_dim = 0;           ///< width of one head; 0: hidden_size / num_heads
  std::uint64_t intermediate_size = 0;  ///< width of the MLP; 0: the family's default
  std::uint64_t max_sequence = 0;       ///< longest sequence, in tokens
  double norm_epsilon = 1e-5;
  bool tie_embeddings = true;
  /// Number of blocks into which the rows of the embedding and of the output matrix are cut. 0:
  /// usual_vocabulary_tiles() decides.
  std::uint64_t vocabulary_tiles = 0;
  /// Number of tiles into which the MLP of a layer is cut, and the maximum for its attention. 1: a
  /// layer is one block. 0: usual_layer_tiles() decides.
  std::uint64_t layer_tiles = 0;
  double init_stddev = 0.02;
  /// Values of the keys that only some families have (Family::details), by name.
  std::map<std::string, text::Json, std::less<>> details;

  /// Looks up `details`. Throws Error(state) when the key is missing.
  [[nodiscard]] const text::Json& detail(std::string_view key) const;
  [[nodiscard]] double number(std::string_view key) const { return detail(key).number(); }
  [[nodiscard]] bool flag(std::string_view key) const { return detail(key).flag(); }
};

/// Numbers of tiles that the user leaves to the program.
struct OpenTiles {
  bool vocabulary = false;
  bool layers = false;

  [[nodiscard]] bool any() const { return vocabulary || layers; }
};

/// Numbers of ranks among which blocks are split, each rank with one piece (BlockSpec::pieces).
struct RankSplit {
  std::uint64_t experts = 1;  ///< expert parallelism: ranks that share the experts of a layer
  std::uint64_t tensor = 1;   ///< tensor parallelism: ranks that share the tiles of all matrices

  friend bool operator==(const RankSplit&, const RankSplit&) = default;
};

/// Called with a key of the model section and the rule that its value breaks. Must throw.
using Refuse = std::function<void(std::string_view key, const std::string& rule)>;

/// Fills in defaults that depend on other keys, then checks the rules of all models and of the
/// family. `split` matters because the default number of tiles depends on the size of blocks, and
/// tensor places share the tiles equally. Throws Error(config) for an unknown family.
void complete(ModelConfig& config, const Refuse& refuse, const RankSplit& split = {});

enum class BlockKind { embedding, layer, head };
enum class Init {
  zeros,
  ones,
  normal,
  uniform,
  log_uniform,  ///< logarithms of uniform values
  row_norms     ///< the norms of the rows of another tensor, see map_of_magnitudes()
};

/// How the rows of a tensor are arranged in files, if not as in memory. The rows form `groups`
/// groups (heads) with `parts` equal parts each (queries, keys and values). Memory has all groups
/// of the first part, then all groups of the next. Files have all parts of the first group, then
/// all parts of the next.
struct StoredRows {
  std::uint64_t parts = 1;
  std::uint64_t groups = 1;
  bool as_columns = false;  ///< the file's matrix is transposed: its columns are the rows here
  /// Number of tensors of this shape that files stack into one. 0: each is stored separately.
  std::uint64_t stacked = 0;
  /// kAddends: a list of fp32 values that must be exact, whatever type weights have. In memory it
  /// is kAddends times as long: first the first addends of all values, then the next ones. All
  /// addends are bf16 values, and those of a value add up to it. 1: memory has the values.
  std::uint64_t addends = 1;
  bool as_row = false;  ///< files have a list as a matrix of one row
  /// Distance between columns in the file's matrix, if it has columns of other tensors between
  /// them.
  std::uint64_t column_step = 1;
  /// For an adapter of all experts: PEFT before 0.19.1 exchanged A and B.
  bool once_exchanged = false;
};
/// Number of bf16 values that any fp32 value is the sum of.
inline constexpr std::uint64_t kAddends = 3;

/// One tensor of a block, or the rows or columns of a tensor that are in this block. `offset`:
/// elements from the start of the block's flat buffer, equal for every kind of state (weight,
/// remainder, moments, gradient).
struct TensorSpec {
  std::string name;                  ///< Hugging Face's name
  std::vector<std::uint64_t> shape;  ///< shape of the part in this block
  Elems offset = 0;
  Elems size = 0;
  std::uint64_t first_row = 0;    ///< index in the whole tensor of the first row in this block
  std::uint64_t rows_in_all = 0;  ///< rows of the whole tensor
  std::uint64_t first_column = 0;
  std::uint64_t columns_in_all = 0;  ///< row length of the whole tensor
  Init init = Init::zeros;
  /// For Init::uniform: the bound b of [-b, b]; for log_uniform: that of (0, b).
  double stddev = 0.0;
  StoredRows stored;
  /// For a tensor of an adapter whose name in files of PEFT is another.
  std::string name_in_files = {};
  double adapter_scale = 1.0;  ///< for A of an adapter: its factor s
  bool frozen = false;         ///< not trained, see freeze()
  bool buffer = false;         ///< never trained: it has no gradient
  bool table = false;          ///< each token reads one row, see BlockBuilder::table()
  bool quantized = false;      ///< stored quantised, see quantize()
  bool adapter = false;        ///< part of an adapter (see adapt()), not of the base model
  bool undecayed = false;      ///< exempt from weight decay, see exempt_from_decay()

  [[nodiscard]] std::vector<std::uint64_t> whole_shape() const;
  /// Returns the index in the whole tensor of the first element in this block.
  [[nodiscard]] Elems first_element() const { return first_row * columns_in_all + first_column; }
  /// Returns whether the block has only some of the columns, so that its rows are not contiguous in
  /// the whole tensor.
  [[nodiscard]] bool cuts_rows() const { return size != shape.front() * columns_in_all; }
};

/// The tensors of a layer that a block holds.
enum class BlockContent {
  whole,      ///< the whole layer
  norm,       ///< the norm before attention or the MLP of a layer in tiles; its tiles follow
  attention,  ///< a tile: queries, keys, values and columns of the output map for some heads
  mlp,        ///< a tile: rows of the first maps and the same columns of the last one
  // Layers with experts instead of an MLP.
  attention_half,  ///< the norm before attention, and attention, in one piece
  router,          ///< the norm before the experts and the router; the experts follow
  shared_expert,   ///< a tile: the expert that computes all rows, weighted by its gate
  expert,  ///< a tile: a routed expert, which computes the rows that the router dispatches to it
  layer_embedding,  ///< follows its layer: a tensor of which each token reads one row, see
                    ///< LayerEmbeddingSpec
  result_norm       ///< follows experts: the norm of their sum
};

/// Values that the products of adapters read and write, outside of adapters' weights: elements or
/// bytes. These products are so small that memory bounds them.
struct AdapterValues {
  std::uint64_t forward = 0;
  std::uint64_t backward = 0;    ///< without recomputation
  std::uint64_t recomputed = 0;  ///< in the recomputation of the layer

  AdapterValues& operator+=(const AdapterValues& more) {
    forward += more.forward;
    backward += more.backward;
    recomputed += more.recomputed;
    return *this;
  }
  friend AdapterValues operator*(const AdapterValues& values, std::uint64_t factor) {
    return {values.forward * factor, values.backward * factor, values.recomputed * factor};
  }
};

/// One block: the unit of placement, transfer and update. Tensors are padded so that each starts on
/// a cache line in every kind of state (32 elements), the block to whole pages (2048 elements), and
/// the tiles of a matrix or of half a layer to the size of the largest.
/// Padding is zero and stays zero under the update.
struct BlockSpec {
  BlockKind kind = BlockKind::layer;
  BlockContent content = BlockContent::whole;  ///< if it belongs to a layer
  std::uint64_t layer = 0;                     ///< number of the layer, if it is part of one
  std::uint64_t expert = 0;                    ///< number of the expert in its layer, if it is one
  /// Number of pieces that the block stands for, each on another rank. With expert parallelism, a
  /// piece is an expert, from `expert` on, and rank r has piece r. With tensor parallelism, it is a
  /// tile, and tensor place p has piece p. Piece p begins at element own_elements() * p.
  std::uint64_t pieces = 1;
  /// Number of the first piece in whole_blocks(), and the distance to the number of the next piece.
  std::size_t number = 0;
  std::size_t number_step = 1;
  /// "embedding", "layer 0", "head". Tiles: "embedding 0", "head 0", "layer 0 attention 3". Norms
  /// before tiles: "layer 0 attention", "layer 0 mlp". Layers with experts: "layer 0 attention",
  /// "layer 0 router", "layer 0 expert 5", "layer 0 experts 4-7". Tables: "layer 0 table".
  std::string name;
  std::string prefix;  ///< common prefix of the tensors' names: "model.layers.0."
  std::vector<TensorSpec> tensors;
  Elems parameters = 0;          ///< without padding
  Elems elements = 0;            ///< with padding
  Elems frozen_elements = 0;     ///< elements of frozen tensors, the last ones of the block
  Elems quantized_elements = 0;  ///< elements of quantised tensors, the last ones of the block
  /// Elements of all matrices that each token is multiplied by, and of the last of these, whose
  /// product the backward pass does not recompute.
  Elems product_elements = 0;
  Elems last_product_elements = 0;
  Elems frozen_product_elements = 0;    ///< the part of product_elements in frozen matrices
  Elems repeated_product_elements = 0;  ///< the part that the backward pass always recomputes
  /// DoRA's extra work, once per pass: elements whose norms are computed, and multiplications for
  /// the weight products that these need.
  Elems norm_elements = 0;
  Elems norm_product_elements = 0;
  double token_share = 1.0;            ///< share of tokens of an expert, assuming balanced routing
  AdapterValues adapter_values;        ///< per token
  std::uint64_t attention_width = 0;   ///< heads x head_dim; 0: no attention
  std::uint64_t attention_window = 0;  ///< tokens that attention sees; 0: all preceding ones
  /// Multiplications per token of a recurrence that takes the place of attention; 0: attention.
  std::uint64_t recurrent_products = 0;

  /// Elements with gradients and optimizer states: the first ones of the block, usually all.
  [[nodiscard]] Elems trained_elements() const { return elements - frozen_elements; }
  /// Elements that one rank computes with: those of one piece.
  [[nodiscard]] Elems own_elements() const { return elements / pieces; }
  [[nodiscard]] Elems own_trained_elements() const { return trained_elements() / pieces; }
  /// Elements stored in the training type, not quantised.
  [[nodiscard]] Elems plain_elements() const { return elements - quantized_elements; }
  /// Returns the tensor with this name, with or without the prefix, or nullptr.
  [[nodiscard]] const TensorSpec* find(std::string_view tensor_name) const;
  /// Like find(), but throws Error(state) if there is no such tensor.
  [[nodiscard]] const TensorSpec& tensor(std::string_view tensor_name) const;
};

/// RMSNorm, or LayerNorm. Values are multiplied by `offset` + NAME.weight.
struct NormSpec {
  std::string name;         ///< "": no weights, values are multiplied by `offset`
  float offset = 0.0F;      ///< if it is not 0, the first weights are zeros
  bool layer_norm = false;  ///< subtracts the mean, and adds NAME.bias
  bool biased = true;       ///< false: a LayerNorm without NAME.bias
  double epsilon = 0.0;     ///< added to the mean squares; 0: norm_epsilon

  friend bool operator==(const NormSpec&, const NormSpec&) = default;
};

/// The embedding, the final norm and the output matrix.
struct OuterSpec {
  std::string tokens;          ///< embedding [vocab_size, hidden_size]
  std::string positions;       ///< learned positions [max_sequence, hidden_size]; "": none
  double token_factor = 1.0;   ///< multiplies the embedding
  bool rounds_factor = false;  ///< the factor is rounded to the training type before
  NormSpec norm;               ///< the final norm
  std::string output = "lm_head.weight";  ///< output matrix [vocab_size, hidden_size], unless tied
  double logit_factor = 1.0;              ///< multiplies the logits, before the cap
  double logit_cap = 0.0;  ///< soft cap of the logits, see AttentionShape::cap; 0: none

  friend bool operator==(const OuterSpec&, const OuterSpec&) = default;
};

struct LayerSpec;

/// A range of rows of the vocabulary, and the block that holds these rows of the output matrix.
struct VocabularyTile {
  std::uint64_t first = 0;
  std::uint64_t rows = 0;
  std::size_t block = 0;
};

/// A model as a list of blocks: embedding, layers, head. With tied embeddings the head has no
/// output matrix and reads the embedding's. A large vocabulary is cut into tiles. Then the
/// embedding has one block per tile, the last with the positions, and so has the head, after a
/// block with the norm (if tied, the head is only that block). Wide layers are cut too. Each half
/// of a layer, attention or MLP, becomes a block with its norm and one block per tile; the half's
/// result is the sum over its tiles. A half with experts begins with a block for norm and router,
/// each expert is a tile, and attention before it is one block. With expert parallelism a block has
/// one expert per rank. With tensor parallelism it has one tile per tensor place: place p of t has
/// the consecutive tiles [p T / t, (p + 1) T / t) of T.
struct Architecture {
  ModelConfig config;  ///< after complete()
  OuterSpec outer;
  std::vector<BlockSpec> blocks;
  std::shared_ptr<const std::vector<LayerSpec>> layers;     ///< shared by copies
  std::optional<AdapterConfig> adapters = std::nullopt;     ///< set by adapt()
  std::optional<Quantization> quantization = std::nullopt;  ///< set by quantize()
  RankSplit split;
  /// The place whose tiles the blocks have, after at_tensor_place(). Blocks before that have the
  /// tiles of all places.
  std::uint64_t tensor_place = 0;

  /// Returns the description of layer `index`.
  [[nodiscard]] const LayerSpec& layer(std::uint64_t index) const;
  /// Number of vocabulary tiles of a tensor place: blocks of the embedding and, unless it is tied,
  /// of the output matrix.
  [[nodiscard]] std::size_t own_vocabulary_tiles() const {
    return config.vocabulary_tiles / split.tensor;
  }
  [[nodiscard]] std::size_t first_layer() const { return own_vocabulary_tiles(); }
  /// Index of the block with the final norm.
  [[nodiscard]] std::size_t head() const { return blocks.size() - 1 - output_blocks(); }
  /// Returns whether `block` is a tile of half a layer.
  [[nodiscard]] bool is_layer_tile(std::size_t block) const {
    const BlockContent content = blocks[block].content;
    return content == BlockContent::attention || content == BlockContent::mlp ||
           content == BlockContent::shared_expert || content == BlockContent::expert;
  }
  /// Returns vocabulary tile `number` of this tensor place, below own_vocabulary_tiles().
  [[nodiscard]] VocabularyTile tile(std::size_t number) const;
  [[nodiscard]] std::uint64_t largest_tile() const;  ///< in rows

  [[nodiscard]] Elems parameters() const;
  /// FLOPs of the matrix products in the forward pass of block `index` for `sequences` sequences of
  /// `length` tokens. The backward pass counts twice that, a recomputation once. Attention counts
  /// the products that are executed (causal half, inside the window).
  [[nodiscard]] double forward_flops(std::size_t index, std::uint64_t sequences,
                                     std::uint64_t length) const;
  /// The part of forward_flops() in attention: scores and weighted values. The backward pass counts
  /// twice that.
  [[nodiscard]] double attention_flops(std::size_t index, std::uint64_t sequences,
                                       std::uint64_t length) const;
  /// The part of recomputed_flops() in attention and the map after it.
  [[nodiscard]] double attention_output_flops(std::size_t index, std::uint64_t sequences,
                                              std::uint64_t length) const;
  /// The part of forward_flops() that the backward pass recomputes: all products of a layer but the
  /// last, and none of other blocks.
  [[nodiscard]] double recomputed_flops(std::size_t index, std::uint64_t sequences,
                                        std::uint64_t length) const;
  /// FLOPs that the backward pass saves because of frozen matrices, compared with 2 *
  /// forward_flops(): their gradients, minus the products of adapters that it recomputes. Norms are
  /// computed once.
  [[nodiscard]] double frozen_flops(std::size_t index, std::uint64_t sequences,
                                    std::uint64_t length) const;
  /// Index of the block at which the backward pass ends: the embedding, the first block of a layer,
  /// or the head. All earlier blocks are frozen.
  [[nodiscard]] std::size_t first_differentiated() const;
  /// Elements of trained tensors without padding.
  [[nodiscard]] Elems trained_parameters() const;

 private:
  /// Number of blocks of the head after the norm's: one per tile of an output matrix in tiles.
  [[nodiscard]] std::size_t output_blocks() const {
    return config.tie_embeddings || config.vocabulary_tiles == 1 ? 0 : own_vocabulary_tiles();
  }
};

/// Number of blocks of a model with a complete config.
std::size_t count_blocks(const ModelConfig& config, const RankSplit& split = {});
/// Returns whether `block` of the blocks that count_blocks() counts is a layer or a part of one.
bool is_layer(const ModelConfig& config, std::size_t block, const RankSplit& split = {});

/// Number of vocabulary tiles for a model shape. It is 1 up to 2^27 elements or twice the largest
/// block of a layer. Otherwise tiles have at most 2^22 elements or a quarter of that block, because
/// a tied tile has two accumulators, which should not need more memory than a layer.
std::uint64_t usual_vocabulary_tiles(std::uint64_t vocabulary, std::uint64_t width,
                                     Elems largest_block);
/// Number of MLP tiles for a model shape. It is 1 for layers of up to 2^30 elements. Otherwise
/// tiles have at most 2^25 elements, with at most 64 tiles per layer. Models of more than 8 layers
/// have fewer (512 in total, at least 4 per layer), because each block costs time.
std::uint64_t usual_layer_tiles(Elems layer, std::uint64_t layers);
/// Number of attention tiles in a layer of a complete config: at most layer_tiles, each with the
/// same number of key heads. Gated delta nets and attention may have different numbers.
std::uint64_t attention_tiles(const ModelConfig& config, std::uint64_t layer = 0);
/// Config of a model whose uncut layers are as wide as the widest tiles of `config`.
ModelConfig config_of_tile(const ModelConfig& config);

/// Config of a family without experts whose layers have the FLOPs per token of the first layer with
/// experts, or of a dense layer if there is none. Configs of other families are returned unchanged.
ModelConfig without_experts(const ModelConfig& config);

/// Completes the config and lays out the blocks. Throws Error(config) with the key and the broken
/// rule, also if the ranks cannot share the experts or the tiles.
Architecture build_architecture(ModelConfig config, const RankSplit& split = {});

/// Returns piece `piece` of `block` as a block. Its tensors begin at its first element.
BlockSpec piece_of(const BlockSpec& block, std::uint64_t piece);
/// Returns the blocks of the same model on one rank, in the order of their numbers: one block per
/// piece.
std::vector<BlockSpec> whole_blocks(const Architecture& model);
/// Returns the model as tensor place `place` computes it: each block has this place's piece.
Architecture at_tensor_place(const Architecture& model, std::uint64_t place);

/// Freezes all tensors whose names match none of `patterns` (globs of fnmatch(3)). Without
/// patterns, all tensors but buffers stay trained. In a block with both, the trained tensors come
/// first, so that gradients and states are one contiguous range. Call it once. `refuse(i, rule)` is
/// called with the number of a pattern that matches no tensor, and must throw. Throws Error(config)
/// if the experts of one block would be trained in part.
void freeze(Architecture& model, std::span<const std::string> patterns,
            const std::function<void(std::size_t, const std::string&)>& refuse);

/// Pattern of exempt_from_decay() for the tensors that transformers' Trainer exempts: biases and
/// norms (Trainer.get_decay_parameter_names() of transformers 5.24).
inline constexpr std::string_view kTransformersExempt = "transformers";

/// Exempts tensors whose names match one of `patterns` (globs of fnmatch(3)) from weight decay.
/// Call it after freeze() or adapt(). `refuse(i, rule)` is called with the number of a pattern that
/// matches no tensor, and must throw.
void exempt_from_decay(Architecture& model, std::span<const std::string> patterns,
                       const std::function<void(std::size_t, const std::string&)>& refuse);

/// Adds adapters to the linear maps that `wanted` selects, and freezes all other tensors except
/// modules_to_save. Call it instead of freeze(). The adapters are trained tensors in the blocks of
/// their maps: MAP.lora_A.weight [rank, in], MAP.lora_B.weight [out, rank] and, with DoRA,
/// MAP.lora_magnitude_vector [out]. `refuse` is called with the offending key of `wanted` if a name
/// matches nothing but maps of attention and MLPs are wanted, if the family's layers do not support
/// adapters or are cut into tiles, and for DoRA with dropout.
void adapt(Architecture& model, AdapterConfig wanted, const Refuse& refuse);

/// Returns the map [out, in] of the same block whose magnitudes `tensor` (Init::row_norms) holds.
/// With AdapterConfig::input_first the map is [in, out].
const TensorSpec& map_of_magnitudes(const BlockSpec& block, const TensorSpec& tensor);

/// Marks the frozen matrices of layers (attention, MLP, experts; not norms, biases or routers) as
/// quantised, and moves them to the end of their blocks. Call it after freeze() or adapt().
/// `refuse(rule)` is called if no such matrix is frozen or if layers are cut into tiles, and must
/// throw.
void quantize(Architecture& model, const Quantization& how,
              const std::function<void(const std::string& rule)>& refuse);

/// The trained parts of a model, and the quantisation of the rest.
struct TrainedParts {
  std::optional<AdapterConfig> adapters;          ///< for adapt(), which then replaces freeze()
  std::vector<std::string> train;                 ///< patterns of freeze()
  std::vector<std::string> weight_decay_exclude;  ///< patterns of exempt_from_decay()
  std::optional<Quantization> quantized_base;     ///< for quantize()
};

/// Returns build_architecture() with these parts trained. `refuse` is called with the offending
/// member of `parts`: "adapters.rank", "train[1]".
Architecture build_trained(const ModelConfig& config, const RankSplit& split,
                           const TrainedParts& parts, const Refuse& refuse);

/// Layout of the quantised matrices of a block. They follow its plain_elements() in the training
/// type; offsets count from there. `bytes`: total size, in whole pages.
struct BlockCodes {
  struct Matrix {
    const TensorSpec* tensor = nullptr;
    Bytes offset = 0;
    QuantizedArrays arrays;
  };
  BlockCodes(const Architecture& model, const BlockSpec& block);

  std::vector<Matrix> matrices;
  Bytes bytes = 0;
};

/// A position in a tensor, and the number of elements from there on that have the same order in
/// files and in memory.
struct TensorRun {
  Elems first = 0;
  Elems count = 0;
};
/// Converts the index `at` of an element of the block's tensor in memory to an index in the whole
/// tensor in files.
TensorRun run_in_files(const TensorSpec& tensor, Elems at);
/// Converts the index `at` of an element of the block's part in files to an index in memory. Not
/// for tensors with addends.
TensorRun run_in_memory(const TensorSpec& tensor, Elems at);

/// Replaces `values`, read from files for the elements from `first` on of a tensor with addends, by
/// these elements. Does nothing for other tensors.
void split_into_addends(const TensorSpec& tensor, Elems first, std::span<float> values);
/// Returns the values of a tensor with addends as files have them.
std::vector<float> sum_of_addends(const TensorSpec& tensor, std::span<const float> elements);

/// Returns the tensor of a router that is added to the scores of experts for the choice, with
/// StoredRows::addends; nullptr for other blocks.
inline const TensorSpec* correction_biases(const BlockSpec& block) {
  if (block.content != BlockContent::router) return nullptr;
  const auto found = std::ranges::find_if(
      block.tensors, [](const TensorSpec& tensor) { return tensor.stored.addends > 1; });
  return found == block.tensors.end() ? nullptr : &*found;
}

}  // namespace ballast::model
