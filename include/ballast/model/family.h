#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ballast/model/architecture.h"

namespace ballast::model {

/// Lays out the tensors of one block consecutively, in the order of add().
class BlockBuilder {
 public:
  /// `prefix`: common prefix of the tensors' names.
  BlockBuilder(BlockKind kind, std::string name, std::string prefix);

  /// Adds a tensor. In a layer, every token is multiplied by each matrix.
  BlockBuilder& add(std::string_view name, std::vector<std::uint64_t> shape, Init init,
                    double stddev = 0.0);
  /// Adds the matrix of the last product of a layer. The backward pass does not need the product.
  BlockBuilder& add_last_product(std::string_view name, std::vector<std::uint64_t> shape,
                                 double stddev);
  /// Adds a list of `size` fp32 values that are never trained and must be exact (see
  /// StoredRows::addends). `init`: zeros or ones.
  BlockBuilder& add_buffer(std::string_view name, std::uint64_t size, Init init = Init::zeros);
  /// Adds the weights and biases of a norm of rows of `width` values.
  BlockBuilder& add_norm(const NormSpec& norm, std::uint64_t width);
  /// Counts elements that each token is multiplied by, for tensors that are not matrices. The
  /// backward pass always recomputes their products.
  BlockBuilder& add_repeated_products(Elems elements);
  /// Declares that the backward pass always recomputes the product of the last tensor, a matrix.
  BlockBuilder& repeated();
  /// Declares how the last matrix, and its bias if one follows it, is stored in files. `index`: its
  /// number among stacked tensors.
  BlockBuilder& stored_by(const StoredRows& rows, std::uint64_t index = 0);
  /// Declares the last tensor, a list, to be a matrix of one row in files.
  BlockBuilder& as_row();
  /// Declares the last tensor to be rows of a larger one, starting at `first_row`.
  BlockBuilder& rows_of(std::uint64_t rows_in_all, std::uint64_t first_row);
  /// Declares the last tensor, a matrix, to be columns of a larger one, starting at `first_column`.
  BlockBuilder& columns_of(std::uint64_t columns_in_all, std::uint64_t first_column);
  /// Declares the last tensor, a matrix, to be a table of which each token reads one row. No token
  /// is multiplied by it.
  BlockBuilder& table();
  /// Removes the prefix from the name of the last tensor.
  BlockBuilder& without_prefix();
  /// Declares what the block holds of a layer.
  BlockBuilder& content(BlockContent content);
  /// Declares the block to be expert `number`, which computes `token_share` of the tokens.
  BlockBuilder& expert(std::uint64_t number, double token_share);
  /// Declares attention with heads of this total width over the last `window` tokens (0: all).
  BlockBuilder& attend(std::uint64_t width, std::uint64_t window = 0);
  /// Declares a recurrence in the place of attention. `width`: that of its results. `products`:
  /// multiplications per token.
  BlockBuilder& recur(std::uint64_t width, std::uint64_t products);
  /// Returns the padded block with buffers at its end; call it once.
  BlockSpec finish();

 private:
  BlockSpec block_;
};

/// A key of the model section that only some families have, named as in Hugging Face's configs.
struct DetailKey {
  std::string name;
  text::Json standard;  ///< the default. A value must have its type; null: any type but a string
};

/// A buffer that Hugging Face's checkpoints may contain although the model computes it.
struct CheckpointBuffer {
  std::string suffix;                ///< end of its name: ".attn.bias"
  std::vector<std::uint64_t> shape;  ///< 0: any extent
};

/// A key of Hugging Face's config.json that the model's results depend on.
struct CheckpointKey {
  std::string name;  ///< "a.b": key b of the object a
  std::string own;   ///< the equivalent key of the model section; "": none
  /// The values that the family supports, if there is no equivalent key. Null is always supported,
  /// and so is a missing key without a standard.
  std::vector<std::string> supported = {};
  text::Json standard = {};  ///< value that transformers' class assumes if the key is missing
  bool nullable = true;      ///< whether the class accepts null; otherwise it refuses it
};

/// How a class of transformers reads the keys of rotary positions in config.json.
struct CheckpointRope {
  std::uint64_t longest = 0;  ///< max_position_embeddings if the key is missing; 0: no such key
  std::string theta = "rope_theta";  ///< the key outside rope_parameters
  /// Key outside rope_parameters for the rotated part of a head; "": all is rotated.
  std::string part = "";
  /// Key for the number of values of a head that rotate, which counts if the file does not give the
  /// part; "": none.
  std::string part_width = "";
  /// original_max_position_embeddings if the key is missing. A class with this value reads that key
  /// only outside rope_parameters and supports no scaled positions but longrope.
  std::optional<std::uint64_t> trained = {};
  bool by_layer_type = false;  ///< rope_parameters has an object per type of layer
  /// The key outside rope_parameters for the base of layers with a window, if by_layer_type; "":
  /// none.
  std::string local_theta = "rope_local_base_freq";
  bool zero_theta = false;  ///< null or 0 as the base means no positions
  /// The class reads rope_parameters, but not rope_scaling.
  bool ignores_scaling = false;
  bool alpha = false;        ///< with alpha, type dynamic has no other key (RotaryUse::alpha)
  text::Json standard = {};  ///< rope_parameters if the key is missing
  std::vector<std::string> unread = {};  ///< keys of rope_parameters that the class ignores
};

/// How a class of transformers reads config.json, in addition to single keys.
struct CheckpointRules {
  CheckpointRope rope = {};
  /// Alternative names of keys. If a file has both, the value under the alternative name wins.
  /// "a.b" is member b of the object a, whose other members have no effect.
  std::vector<std::pair<std::string, std::string>> aliases = {};
  /// Further names of this kind, which count if the file does not give the key.
  std::vector<std::pair<std::string, std::string>> fallbacks = {};
  std::vector<std::string> without_effect = {};  ///< keys that the class ignores
  std::vector<std::string> other_types = {};     ///< other values of model_type for the family
  /// Whether PEFT converts the names of the maps of experts (its conversion for stacked experts).
  bool peft_converts = false;
  /// Members that per_layer_config may have for layers without a window, with the keys that give
  /// their values for all of these layers. Empty: the class does not read per_layer_config.
  std::vector<std::pair<std::string, std::string>> of_full_layers = {};
};

/// Extents of attention in a layer.
struct HeadExtents {
  std::uint64_t heads = 0;
  std::uint64_t kv_heads = 0;  ///< divides heads
  std::uint64_t head_dim = 0;
  std::uint64_t value_dim = 0;  ///< AttentionShape::value_dim

  friend bool operator==(const HeadExtents&, const HeadExtents&) = default;
};

struct Rotary;

/// A family of models: its keys, its rules in addition to those of all models, and its tensors. The
/// forward and backward passes of its layer are templates over a device's operations
/// (src/model/compute).
class Family {
 public:
  virtual ~Family() = default;
  Family() = default;
  Family(const Family&) = delete;
  Family& operator=(const Family&) = delete;

  /// The value of model.family.
  [[nodiscard]] virtual std::string_view name() const = 0;
  [[nodiscard]] virtual bool ties_embeddings() const { return false; }  ///< the default
  [[nodiscard]] virtual std::vector<DetailKey> details() const { return {}; }
  /// Fills in and checks the family's keys, after complete() has handled the common ones. Sets at
  /// least intermediate_size.
  virtual void complete(ModelConfig& config, const Refuse& refuse) const = 0;

  [[nodiscard]] virtual OuterSpec outer(const ModelConfig& config) const = 0;
  /// Describes layer `index`, counted from 0, of a complete config.
  [[nodiscard]] virtual LayerSpec layer(const ModelConfig& config, std::uint64_t index) const = 0;
  /// Returns the reason why such models cannot have sequences of `length` tokens, as a rule of
  /// data.sequence_length; "" if they can.
  [[nodiscard]] virtual std::string obstacle_to_length(const ModelConfig& /*config*/,
                                                       std::uint64_t /*length*/) const {
    return "";
  }
  /// Width of a head of queries and keys, if the family's own keys give it; 0: head_dim.
  [[nodiscard]] virtual std::uint64_t head_width(const ModelConfig& /*config*/) const { return 0; }
  /// Rotary positions of the layers (see RotarySpec); empty if no layer rotates.
  [[nodiscard]] virtual std::vector<Rotary> rotaries(const ModelConfig& config,
                                                     const Refuse& refuse) const;
  /// Turns the numbers of heads of a complete config into those of one tile.
  virtual void cut_heads(ModelConfig& config) const;
  /// The value of model_type in Hugging Face's config.json.
  [[nodiscard]] virtual std::string_view checkpoint_type() const { return name(); }
  /// The class in Hugging Face's transformers, which other programs select by; "": none.
  [[nodiscard]] virtual std::string_view checkpoint_class() const { return ""; }
  /// The keys of config.json. The first is model_type, which corresponds to the key `family`.
  [[nodiscard]] virtual std::vector<CheckpointKey> checkpoint_keys() const { return {}; }
  [[nodiscard]] virtual CheckpointRules checkpoint_rules() const { return {}; }
  /// Tensors of a checkpoint that are not weights, for a complete config.
  [[nodiscard]] virtual std::vector<CheckpointBuffer> checkpoint_buffers(
      const ModelConfig& /*config*/) const {
    return {};
  }
};

/// Registers a family in addition to the built-in ones. Call it before other threads read configs.
void add_family(std::unique_ptr<const Family> family);
/// Returns the family. Throws Error(config) with a suggestion for an unknown name.
const Family& family(std::string_view name);
/// Names of all families, in order of registration.
std::vector<std::string> family_names();

/// Names of the families that have the key of the model section, in order of registration.
std::vector<std::string> families_with_key(std::string_view key);

/// Returns those of `keys`, keys of the model section, whose values change nothing that the model
/// computes and no limit that it sets, whatever they are, because other keys switch them off.
/// `given`: a valid config before complete(). A key is tried with other values; it has an effect if
/// one of them makes another model, or if none of them is valid.
std::vector<std::string> unused_keys(const ModelConfig& given, std::span<const std::string> keys);

/// Documentation of a key of the model section. Marks in braces stand for lists of families.
struct KeyText {
  std::string_view meaning;
  std::string_view standard;  ///< its default
  std::string_view range;
};
/// Returns the documentation of a key that differs between families; empty for others.
KeyText text_of_key(std::string_view name);

/// The keys of config.json that transformers' class for this model_type reads, separated by spaces,
/// without those that all classes share. For a quant_method: the keys of quantization_config.
/// Nothing for a type that transformers does not have.
std::optional<std::string_view> read_attributes(std::string_view model_type);

/// Values of model_type whose models have a text_config and other parts, separated by spaces.
struct TextWrappers {
  std::string_view all;   ///< they compute text alone exactly like the model of their text_config
  std::string_view flat;  ///< earlier folders have the keys of the text model outside text_config
  std::string_view with_text_model;  ///< the class calls its part text_model, not language_model
};
TextWrappers text_wrappers();
/// Returns the type that computes like a model_type of text_config, "" if it has its own name.
std::string_view equal_text_model(std::string_view type);
/// A default of transformers' class for a text_config, other than that of the text model alone.
struct TextModelStandard {
  std::string_view types;  ///< values of model_type in text_config, separated by spaces
  const char* key = nullptr;
  double value = 0.0;
};
std::span<const TextModelStandard> standards_of_text_models();

/// Config with the family's defaults. Throws like family().
ModelConfig default_config(std::string_view family_name);

}  // namespace ballast::model
