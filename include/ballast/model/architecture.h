#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ballast/core/units.h"
#include "ballast/model/adapters.h"
#include "ballast/model/quantization.h"
#include "ballast/text/json.h"

namespace ballast::model {

/// The `model` section of a config. Keys are named as in Hugging Face's configs or similarly.
/// complete() replaces 0 by the default.
struct ModelConfig {
  std::string family = "gpt2";  ///< a registered family (family.h)
  std::uint64_t vocab_size = 256;
  std::uint64_t hidden_size = 0;
  std::uint64_t num_layers = 0;
  std::uint64_t num_heads = 0;
  std::uint64_t num_kv_heads = 0;       ///< heads of keys and values; 0: num_heads
  std::uint64_t head_dim = 0;           ///< values of one head; 0: hidden_size / num_heads
  std::uint64_t intermediate_size = 0;  ///< width of the MLP; 0: the family's default
  std::uint64_t max_sequence = 0;       ///< longest sequence, in tokens
  double norm_epsilon = 1e-5;
  bool tie_embeddings = true;
  /// Blocks into which the rows of the embedding and of the output matrix are cut; 0: by the rule
  /// of usual_vocabulary_tiles().
  std::uint64_t vocabulary_tiles = 0;
  /// Tiles into which the MLP of a layer is cut, and its attention into at most so many; 1: a layer
  /// is one block; 0: by the rule of usual_layer_tiles().
  std::uint64_t layer_tiles = 0;
  double init_stddev = 0.02;
  /// Keys that only some families have, by name (Family::details).
  std::map<std::string, text::Json, std::less<>> details;

  /// Looks up `details`. Throws Error(state) when the key is missing.
  [[nodiscard]] const text::Json& detail(std::string_view key) const;
  [[nodiscard]] double number(std::string_view key) const { return detail(key).number(); }
  [[nodiscard]] bool flag(std::string_view key) const { return detail(key).flag(); }
};

/// Called with a key of the model section and the rule that its value breaks; throws.
using Refuse = std::function<void(std::string_view key, const std::string& rule)>;

/// Fills in defaults that depend on other keys and checks the rules of all models and of the
/// family. `expert_ranks`: see Architecture; a usual number of tiles depends on the size of blocks.
/// Throws Error(config) for an unknown family.
void complete(ModelConfig& config, const Refuse& refuse, std::uint64_t expert_ranks = 1);

enum class BlockKind { embedding, layer, head };
enum class Init {
  zeros,
  ones,
  normal,
  uniform,
  row_norms  ///< the norms of another tensor: map_of_magnitudes()
};

/// How a tensor lies in files if not as in memory. Its rows are in `parts` equal parts of `groups`
/// equal groups: queries, keys and values of each head. In memory all groups of a part follow each
/// other; in files all parts of a group.
struct StoredRows {
  std::uint64_t parts = 1;
  std::uint64_t groups = 1;
  bool as_columns = false;  ///< rows are columns of the file's matrix, which is transposed
  /// So many tensors of this shape are one in files; 0: each is its own.
  std::uint64_t stacked = 0;
};

/// One tensor of a block, or the rows or columns of one that are in this block. `offset`: elements
/// from the start of the block's flat buffer, the same for every kind of state (weight, remainder,
/// moments, gradient).
struct TensorSpec {
  std::string name;                  ///< Hugging Face's name
  std::vector<std::uint64_t> shape;  ///< of what is in this block
  Elems offset = 0;
  Elems size = 0;
  std::uint64_t first_row = 0;    ///< of the rows in this block
  std::uint64_t rows_in_all = 0;  ///< of the whole tensor
  std::uint64_t first_column = 0;
  std::uint64_t columns_in_all = 0;  ///< elements of a row of the whole tensor
  Init init = Init::zeros;
  double stddev = 0.0;  ///< for Init::normal; for Init::uniform, the bound on both sides of 0
  StoredRows stored;
  bool frozen = false;     ///< not trained, see freeze()
  bool coded = false;      ///< kept as codes, see quantize()
  bool adapter = false;    ///< of an adapter, see adapt(): files of the model lack it
  bool undecayed = false;  ///< without weight decay, see exempt_from_decay()

  [[nodiscard]] std::vector<std::uint64_t> whole_shape() const;
  /// Index in the whole tensor of the first element in this block.
  [[nodiscard]] Elems first_element() const { return first_row * columns_in_all + first_column; }
  /// Whether the block has only some columns: its rows do not follow each other in the tensor.
  [[nodiscard]] bool cuts_rows() const { return size != shape.front() * columns_in_all; }
};

/// What a block of a layer holds.
enum class LayerPart {
  whole,      ///< the whole layer
  norm,       ///< the norm before attention or the MLP of a layer that is cut; its tiles follow
  attention,  ///< a tile: queries, keys, values and columns of the output map of some heads
  mlp,        ///< a tile: rows of the first maps and the same columns of the last one
  // Layers with experts instead of an MLP.
  attention_half,  ///< the norm before attention and attention, in one piece
  router,          ///< the norm before the experts and the router; the experts follow
  shared_expert,   ///< a tile: the expert that computes all rows, weighed by a gate of its own
  expert           ///< a tile: an expert, which computes the rows that the router sends to it
};

/// One block: the unit of placement, transfer and update. Tensors are padded so that each starts on
/// a cache line in every kind of state (32 elements), the block to whole pages (2048 elements).
/// Padding is zero and stays zero under the update.
struct BlockSpec {
  BlockKind kind = BlockKind::layer;
  LayerPart part = LayerPart::whole;  ///< of a layer
  std::uint64_t layer = 0;            ///< the number of the layer, if it is one
  std::uint64_t expert = 0;           ///< the number of the expert in its layer, if it is one
  /// With expert parallelism: consecutive experts of equal size from that one on. The rank at place
  /// r of the run has only expert r of them, which lies at elements / experts * r of the block.
  std::uint64_t experts = 1;
  /// The number of the block, or of its first expert, in the model without expert parallelism.
  std::size_t number = 0;
  /// "embedding", "layer 0", "head"; tiles: "embedding 0", "head 0", "layer 0 attention 3"; norms
  /// before tiles: "layer 0 attention", "layer 0 mlp"; with experts: "layer 0 attention", "layer 0
  /// router", "layer 0 expert 5", "layer 0 experts 4-7".
  std::string name;
  std::string prefix;  ///< common prefix of the tensors' names: "model.layers.0."
  std::vector<TensorSpec> tensors;
  Elems parameters = 0;       ///< without padding
  Elems elements = 0;         ///< with padding
  Elems frozen_elements = 0;  ///< of these, the last ones: those of frozen tensors
  Elems coded_elements = 0;   ///< of these, the last ones: those that are kept as codes
  /// Elements of all matrices that each token is multiplied by, and of the last of them, whose
  /// product the backward pass does not recompute.
  Elems product_elements = 0;
  Elems last_product_elements = 0;
  Elems frozen_product_elements = 0;    ///< of product_elements, those of frozen matrices
  Elems repeated_product_elements = 0;  ///< those that the backward pass always computes again
  /// Of DoRA, once in each pass: elements of which norms are computed, and multiplications of the
  /// products of weights that these need.
  Elems norm_elements = 0;
  Elems norm_product_elements = 0;
  double token_share = 1.0;  ///< of the tokens, those that an expert computes if all have as many
  std::uint64_t attention_width = 0;   ///< heads x head_dim; 0: no attention
  std::uint64_t attention_window = 0;  ///< tokens that attention sees; 0: all before

  /// Elements that have gradients and states: all, or the first ones.
  [[nodiscard]] Elems trained_elements() const { return elements - frozen_elements; }
  /// The same of what one rank computes with: an expert, if the block has several.
  [[nodiscard]] Elems own_elements() const { return elements / experts; }
  [[nodiscard]] Elems own_trained_elements() const { return trained_elements() / experts; }
  /// Elements that are kept in the training type.
  [[nodiscard]] Elems plain_elements() const { return elements - coded_elements; }
  /// The tensor of that name, with or without the prefix; nullptr if missing.
  [[nodiscard]] const TensorSpec* find(std::string_view tensor_name) const;
  /// The same, but throws Error(state) if missing.
  [[nodiscard]] const TensorSpec& tensor(std::string_view tensor_name) const;
};

/// Names of the tensors outside the layers.
struct OuterTensors {
  std::string tokens;          ///< of the embedding: [vocab_size, hidden_size]
  std::string positions;       ///< of the embedding: [max_sequence, hidden_size], learned; "": none
  std::string norm;            ///< of the head: NORM.weight and optionally NORM.bias
  bool norm_has_bias = true;   ///< a LayerNorm; false: an RMSNorm
  float norm_offset = 0.0F;    ///< of an RMSNorm: it multiplies by this offset plus its weight
  bool scales_tokens = false;  ///< the embedding is multiplied by sqrt(hidden_size)
  std::string output = "lm_head.weight";  ///< of the head: [vocab_size, hidden_size] unless tied
};

/// Rows of the vocabulary, and the block that holds those of the output matrix.
struct VocabularyTile {
  std::uint64_t first = 0;
  std::uint64_t rows = 0;
  std::size_t block = 0;
};

/// A model as a list of blocks: embedding, layers, head. With tied embeddings the head has no
/// weight matrix of its own and reads the embedding's. A large vocabulary is cut into tiles: then
/// the embedding is one block per tile, the last of them with the positions, and so is the head,
/// the first of them with the norm (if tied, the head is one block with the norm). Wide layers are
/// cut too: each half, attention and MLP, is a block with the norm before it, then one per tile;
/// the tiles add their parts of the half's result. Experts are such tiles, of a half that begins
/// with a norm and a router; attention before them is one block. With expert parallelism a block
/// has an expert for each rank.
struct Architecture {
  ModelConfig config;  ///< complete
  OuterTensors outer;
  std::vector<BlockSpec> blocks;
  std::optional<AdapterConfig> adapters = std::nullopt;     ///< of adapt()
  std::optional<Quantization> quantization = std::nullopt;  ///< of quantize()
  /// Ranks that share the experts of a layer, with one in each block; 1: each rank has all experts.
  std::uint64_t expert_ranks = 1;

  [[nodiscard]] std::size_t first_layer() const { return config.vocabulary_tiles; }
  /// The block with the final norm.
  [[nodiscard]] std::size_t head() const {
    return blocks.size() - (config.tie_embeddings ? 1 : config.vocabulary_tiles);
  }
  /// Whether `block` is a tile of half a layer.
  [[nodiscard]] bool is_layer_tile(std::size_t block) const {
    const LayerPart part = blocks[block].part;
    return part == LayerPart::attention || part == LayerPart::mlp ||
           part == LayerPart::shared_expert || part == LayerPart::expert;
  }
  [[nodiscard]] VocabularyTile tile(std::size_t number) const;
  [[nodiscard]] std::uint64_t largest_tile() const;  ///< in rows

  [[nodiscard]] Elems parameters() const;
  /// Matrix-multiply FLOPs of the forward pass of block `index` for `sequences` sequences of
  /// `length` tokens; backward counts twice that, recompute once. Attention's products count as
  /// executed (causal half, inside the window).
  [[nodiscard]] double forward_flops(std::size_t index, std::uint64_t sequences,
                                     std::uint64_t length) const;
  /// The part of forward_flops() that the backward pass recomputes: all but the last product of a
  /// layer, nothing of other blocks.
  [[nodiscard]] double recomputed_flops(std::size_t index, std::uint64_t sequences,
                                        std::uint64_t length) const;
  /// What the backward pass spares of twice forward_flops(): the part by frozen matrices, for whose
  /// gradients it would need as many, less the products of adapters that it computes again. Norms
  /// are computed once.
  [[nodiscard]] double frozen_flops(std::size_t index, std::uint64_t sequences,
                                    std::uint64_t length) const;
  /// The block with which the backward pass ends: the embedding, the first block of a layer, or the
  /// head. All before it are frozen.
  [[nodiscard]] std::size_t first_differentiated() const;
  /// Elements of trained tensors, without padding.
  [[nodiscard]] Elems trained_parameters() const;
};

/// Blocks of a model with a complete config; `expert_ranks`: see Architecture.
std::size_t count_blocks(const ModelConfig& config, std::uint64_t expert_ranks = 1);
/// Whether `block` of so many (count_blocks()) is a layer or a part of one.
bool is_layer(const ModelConfig& config, std::size_t block, std::size_t blocks);

/// The number of tiles of a vocabulary, which depends on the shape of the model alone: 1 up to 2^27
/// elements or twice the largest block of a layer; otherwise tiles have at most 2^22 elements, or a
/// quarter of that block: a tied tile has two accumulators, which should not need more memory than
/// a layer.
std::uint64_t usual_vocabulary_tiles(std::uint64_t vocabulary, std::uint64_t width,
                                     Elems largest_block);
/// The number of tiles of an MLP, which depends on the shape of the model alone: 1 for layers of up
/// to 2^30 elements; otherwise tiles have at most 2^25, but there are at most 64, and fewer in a
/// model of more than 8 layers (512 in all, at least 4), since a block has a price of its own.
std::uint64_t usual_layer_tiles(Elems layer, std::uint64_t layers);
/// The same for attention, of a complete config: at most as many, of equally many heads of keys.
std::uint64_t attention_tiles(const ModelConfig& config);
/// The config of a model whose layers in one piece are as wide as the widest tiles of `config`.
ModelConfig config_of_tile(const ModelConfig& config);

/// The config of a family without experts with the FLOPs per token of the first layer with experts,
/// or of a dense one if there is none. Returns the configs of other families unchanged.
ModelConfig without_experts(const ModelConfig& config);

/// Completes the config and lays out the blocks. `expert_ranks`: see Architecture. Throws
/// Error(config) naming the key and the broken rule, also if the ranks cannot share the experts.
Architecture build_architecture(ModelConfig config, std::uint64_t expert_ranks = 1);

/// The blocks of the same model without expert parallelism: each expert is one.
std::vector<BlockSpec> blocks_without_expert_parallelism(const Architecture& model);

/// Freezes all tensors whose names match none of `patterns`, globs of fnmatch(3); without patterns
/// all stay trained. In a block with both, the trained tensors come first, so that one range has
/// all of its gradients and states. Call it once. `refuse(i, rule)` is called with the number of a
/// pattern that matches no tensor, and must throw. Throws Error(config) if experts in a block of
/// several are trained in part.
void freeze(Architecture& model, std::span<const std::string> patterns,
            const std::function<void(std::size_t, const std::string&)>& refuse);

/// A pattern of exempt_from_decay() that stands for the tensors that transformers' Trainer exempts:
/// biases and norms (Trainer.get_decay_parameter_names() of transformers 5.24).
inline constexpr std::string_view kTransformersExempt = "transformers";

/// Exempts all tensors whose names match one of `patterns`, globs of fnmatch(3), from weight decay.
/// Call it after freeze() or adapt(). `refuse(i, rule)` is called with the number of a pattern that
/// matches no tensor, and must throw.
void exempt_from_decay(Architecture& model, std::span<const std::string> patterns,
                       const std::function<void(std::size_t, const std::string&)>& refuse);

/// Adds adapters to the maps that `wanted` names, as trained tensors MAP.lora_A.weight [rank, in]
/// and MAP.lora_B.weight [out, rank], with DoRA also MAP.lora_magnitude_vector [out], of their
/// blocks, and freezes all others but modules_to_save. Instead of freeze(). `refuse` is called with
/// the key of `wanted` that breaks a rule: nothing or something else than maps of attention and
/// MLPs has that name, the family's layers cannot have adapters or are cut into tiles, DoRA with
/// dropout.
void adapt(Architecture& model, AdapterConfig wanted, const Refuse& refuse);

/// The map [out, in] whose magnitudes `tensor` (Init::row_norms) of the same block are. With
/// AdapterConfig::input_first it is [in, out].
const TensorSpec& map_of_magnitudes(const BlockSpec& block, const TensorSpec& tensor);

/// Keeps the frozen matrices of layers (attention, MLP, experts; not norms, biases or routers) as
/// codes. In a block they come last. Call it after freeze() or adapt(). `refuse(rule)` is called if
/// no such matrix is frozen or layers are cut into tiles, and must throw.
void quantize(Architecture& model, const Quantization& how,
              const std::function<void(const std::string& rule)>& refuse);

/// Where the codes of a block lie: behind its plain_elements() in the training type, each matrix at
/// an offset from there; `bytes` of all, in whole pages.
struct BlockCodes {
  struct Matrix {
    const TensorSpec* tensor = nullptr;
    Bytes offset = 0;
    CodedArrays arrays;
  };
  BlockCodes(const Architecture& model, const BlockSpec& block);

  std::vector<Matrix> matrices;
  Bytes bytes = 0;
};

/// A place in a tensor, and how many elements from there on have the same order in files and in
/// memory.
struct TensorRun {
  Elems first = 0;
  Elems count = 0;
};
/// Where element `at` of a tensor in memory is in the whole tensor in files.
TensorRun run_in_files(const TensorSpec& tensor, Elems at);
/// Where element `at` of those of a block in files is in memory.
TensorRun run_in_memory(const TensorSpec& tensor, Elems at);

}  // namespace ballast::model
