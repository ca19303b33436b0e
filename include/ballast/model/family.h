#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "ballast/model/architecture.h"

namespace ballast::model {

/// Lays out the tensors of one block behind each other, in the order in which they are added.
class BlockBuilder {
 public:
  /// `prefix`: of the names of all tensors.
  BlockBuilder(BlockKind kind, std::string name, std::string prefix);

  /// In a layer, every token is multiplied with each matrix.
  BlockBuilder& add(std::string_view name, std::vector<std::uint64_t> shape, Init init,
                    double stddev = 0.0);
  /// The last product of a layer: the backward pass does not need its result.
  BlockBuilder& add_last_product(std::string_view name, std::vector<std::uint64_t> shape,
                                 double stddev);
  /// The layer has an attention whose heads are so wide together.
  BlockBuilder& attend(std::uint64_t width);
  /// The block, padded. The builder is used up.
  BlockSpec finish();

 private:
  BlockSpec block_;
};

/// A key of the model section that not every family has: a number.
struct NumberKey {
  std::string name;
  double standard = 0.0;
};

/// The description of a family of models: keys and rules beyond those of all models, and tensors by
/// name. Its layer, forward and backward, is a template over the operations of a device, in the
/// same file (src/model/families).
class Family {
 public:
  virtual ~Family() = default;
  Family() = default;
  Family(const Family&) = delete;
  Family& operator=(const Family&) = delete;

  /// What model.family calls it.
  [[nodiscard]] virtual std::string_view name() const = 0;
  [[nodiscard]] virtual bool ties_embeddings() const { return false; }  ///< the default
  [[nodiscard]] virtual std::vector<NumberKey> numbers() const { return {}; }
  /// complete() for what only this family knows, after the common keys: at least
  /// intermediate_size has a default.
  virtual void complete(ModelConfig& config, const Refuse& refuse) const = 0;

  [[nodiscard]] virtual OuterTensors outer() const = 0;
  /// Layer `index`, counted from 0, of a complete config.
  [[nodiscard]] virtual BlockSpec layer(const ModelConfig& config, std::uint64_t index) const = 0;
};

/// Adds a family to those that configs may name, which are gpt2 and llama from the start. To be
/// called before any other thread reads a config.
void add_family(std::unique_ptr<const Family> family);
/// Throws Error(config) with a suggestion when there is none of that name.
const Family& family(std::string_view name);
/// In the order in which they were added.
std::vector<std::string> family_names();

/// A config of which only the family is known, with its defaults. Throws like family().
ModelConfig default_config(std::string_view family_name);

}  // namespace ballast::model
