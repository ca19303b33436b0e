#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ballast/model/architecture.h"

namespace ballast::model {

/// Lays out the tensors of one block one after another, in the order of add().
class BlockBuilder {
 public:
  /// `prefix`: common prefix of the tensors' names.
  BlockBuilder(BlockKind kind, std::string name, std::string prefix);

  /// Adds a tensor. In a layer, every token is multiplied by each matrix.
  BlockBuilder& add(std::string_view name, std::vector<std::uint64_t> shape, Init init,
                    double stddev = 0.0);
  /// Adds the matrix of the last product of a layer; the backward pass does not need its result.
  BlockBuilder& add_last_product(std::string_view name, std::vector<std::uint64_t> shape,
                                 double stddev);
  /// Declares how the last matrix lies in files, and its bias if one follows it; of stacked tensors
  /// they are number `index`.
  BlockBuilder& stored_by(const StoredRows& rows, std::uint64_t index = 0);
  /// Declares the last tensor to be rows of a larger one, from `first_row` on.
  BlockBuilder& rows_of(std::uint64_t rows_in_all, std::uint64_t first_row);
  /// Declares the last tensor, a matrix, to be columns of a larger one, from `first_column` on.
  BlockBuilder& columns_of(std::uint64_t columns_in_all, std::uint64_t first_column);
  /// Declares the block to be a part of a layer that is cut.
  BlockBuilder& part(LayerPart part);
  /// Declares the block to be expert `number`, which computes this share of the tokens.
  BlockBuilder& expert(std::uint64_t number, double token_share);
  /// Declares attention with this total width of heads, to the last `window` tokens (0: all).
  BlockBuilder& attend(std::uint64_t width, std::uint64_t window = 0);
  /// Returns the padded block; call it once.
  BlockSpec finish();

 private:
  BlockSpec block_;
};

/// A key of the model section that only some families have, named as in Hugging Face's configs.
struct DetailKey {
  std::string name;
  text::Json standard;  ///< the default. A value has its type; if it is null, any but a string
};

/// A buffer that Hugging Face's checkpoints may hold. The model computes it itself.
struct CheckpointBuffer {
  std::string suffix;                ///< of its name: ".attn.bias"
  std::vector<std::uint64_t> shape;  ///< 0: any extent
};

/// A key of Hugging Face's config.json on which the results of the model depend.
struct CheckpointKey {
  std::string name;  ///< "a.b": key b of the object a
  std::string own;   ///< the key of the model section that has the same value; "": none
  /// Without such a key: the values that the family supports. A missing key and null always are.
  std::vector<std::string> supported = {};
  text::Json standard = {};  ///< what transformers' class takes if the file lacks the key
  bool nullable = true;      ///< whether the class reads null as a value; it refuses null otherwise
};

/// How a class of transformers reads the keys of rotary positions in config.json.
struct CheckpointRope {
  std::uint64_t longest =
      0;  ///< max_position_embeddings if the file lacks it; 0: no such positions
  std::string theta = "rope_theta";  ///< the key outside of rope_parameters
  /// The key outside of rope_parameters for the rotated part of a head; "": all is rotated.
  std::string part = "";
  /// original_max_position_embeddings if the file lacks it. Such a class reads that key only
  /// outside of rope_parameters, and has no scaled positions but longrope.
  std::optional<std::uint64_t> trained = {};
  bool by_layer_type = false;  ///< rope_parameters has an object per type of layer
  text::Json standard = {};    ///< rope_parameters if the file lacks them
};

/// How a class of transformers reads config.json, in addition to single keys.
struct CheckpointRules {
  CheckpointRope rope = {};
  /// Other names of keys. If a file has both, the other name's value counts.
  std::vector<std::pair<std::string, std::string>> aliases = {};
  std::vector<std::string> without_effect = {};  ///< keys that the class does not compute with
};

/// A family of models: keys and rules beyond those of all models, and named tensors. Its layer,
/// forward and backward, is a template over the operations of a device (src/model/compute).
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
  /// The family's part of complete(), after the common keys. Sets at least intermediate_size.
  virtual void complete(ModelConfig& config, const Refuse& refuse) const = 0;

  [[nodiscard]] virtual OuterTensors outer() const = 0;
  /// Layer `index`, counted from 0, of a complete config, in one piece.
  [[nodiscard]] virtual BlockSpec layer(const ModelConfig& config, std::uint64_t index) const = 0;
  /// Whether layers of such models can be cut into tiles.
  [[nodiscard]] virtual bool cuts_layers(const ModelConfig& /*config*/) const { return false; }
  /// The blocks of layer `index` of a complete config with layer_tiles above 1: two norms, each
  /// followed by its tiles (see Architecture). Called if cuts_layers().
  [[nodiscard]] virtual std::vector<BlockSpec> layer_tiles(const ModelConfig& /*config*/,
                                                           std::uint64_t /*index*/) const {
    return {};
  }
  /// The blocks of layer `index` of a complete config: one, tiles, or experts.
  [[nodiscard]] virtual std::vector<BlockSpec> blocks_of_layer(const ModelConfig& config,
                                                               std::uint64_t index) const {
    if (config.layer_tiles > 1) return layer_tiles(config, index);
    return {layer(config, index)};
  }
  /// Their number.
  [[nodiscard]] virtual std::size_t count_blocks_of_layer(const ModelConfig& config,
                                                          std::uint64_t index) const;
  /// The experts of layer `index`; 0: it has none.
  [[nodiscard]] virtual std::uint64_t experts_of_layer(const ModelConfig& /*config*/,
                                                       std::uint64_t /*index*/) const {
    return 0;
  }
  /// The factor of attention's scores; 0: 1 / sqrt(head_dim).
  [[nodiscard]] virtual double score_scale(const ModelConfig& /*config*/) const { return 0.0; }
  /// Whether what a token gets depends on the length of its document, in documents of at most
  /// `length` tokens: some scalings of rotary positions differ for long documents.
  [[nodiscard]] virtual bool depends_on_documents(const ModelConfig& /*config*/,
                                                  std::uint64_t /*length*/) const {
    return false;
  }
  /// The value of model_type in Hugging Face's config.json.
  [[nodiscard]] virtual std::string_view checkpoint_type() const { return name(); }
  /// The class of Hugging Face's transformers; other programs choose their own by it. "": none.
  [[nodiscard]] virtual std::string_view checkpoint_class() const { return ""; }
  /// The first is model_type, whose own key is family.
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
/// Throws Error(config) with a suggestion for an unknown name.
const Family& family(std::string_view name);
/// In order of registration.
std::vector<std::string> family_names();

/// A config with the defaults of the family. Throws like family().
ModelConfig default_config(std::string_view family_name);

}  // namespace ballast::model
