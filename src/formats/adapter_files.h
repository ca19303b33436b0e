#pragma once

#include <array>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ballast/config/adapter_folder.h"
#include "ballast/formats/weight_files.h"
#include "ballast/model/architecture.h"
#include "ballast/text/json.h"

namespace ballast::formats {

/// Throws Error(data): the path of the files, and the message.
[[noreturn]] void refuse_adapters(const WeightFiles& files, const std::string& message);

/// Returns the values of a tensor of the files.
std::vector<float> read_whole(const WeightFiles& files, const StoredTensor& tensor);

/// Returns the transpose [columns, rows] of a matrix [rows, columns].
std::vector<float> transposed(std::span<const float> from, std::size_t rows, std::size_t columns);

/// Order, according to adapter_config.json, of adapters of all experts of a layer. PEFT from
/// 0.19.1 on has A [experts r, in], with row e r + j for row j of expert e, and B [out, experts r],
/// with column j experts + e. Earlier versions exchange A and B of parameters [experts, out, in].
/// Unsloth before September 2026 has column e r + j in B.
struct StackedOrder {
  std::optional<bool> exchanged;  ///< the order before PEFT 0.19.1; none: no peft_version
  bool by_expert = false;         ///< lora_B_layout is "expert_major"
  bool can_be_exchanged = true;   ///< the parameter is [experts, out, in]

  /// Reads the file in `folder`. Throws Error(data) for an unknown lora_B_layout.
  static StackedOrder read(const std::filesystem::path& folder);
};

/// Matrices of all experts: A [experts, rank, in], B [experts, out, rank].
struct StackedAdapter {
  std::uint64_t experts = 0;
  std::uint64_t rank = 0;
  std::uint64_t in = 0;
  std::uint64_t out = 0;
  std::vector<float> a;
  std::vector<float> b;

  [[nodiscard]] std::span<const float> a_of(std::uint64_t expert) const {
    return std::span(a).subspan(expert * rank * in, rank * in);
  }
  [[nodiscard]] std::span<const float> b_of(std::uint64_t expert) const {
    return std::span(b).subspan(expert * out * rank, out * rank);
  }
};

/// Reads the adapter of a parameter whose tensors are `a` and `b` in the files. `in` and `out`: of
/// one expert's map; one of them may be 0, the one that fits the other. Throws Error(data) if their
/// shapes do not fit, or if the order is ambiguous (equal sides, no version).
StackedAdapter read_stacked_adapter(const WeightFiles& files, const std::string& a,
                                    const std::string& b, const StackedOrder& order,
                                    std::uint64_t experts, std::uint64_t in, std::uint64_t out);

/// The tensors of a PEFT folder (config/adapter_folder.h): those of adapters, and modules that are
/// trained in full.
class AdapterFiles {
 public:
  /// Throws like WeightFiles.
  explicit AdapterFiles(const std::filesystem::path& folder);

  /// Throws Error(data) naming the file and the tensor unless it contains exactly the trained
  /// tensors of `model`.
  void check(const model::Architecture& model) const;
  /// fp32 values of a trained tensor from element `first` on, in the order of memory. Throws
  /// Error(data), Error(io).
  void read(const model::TensorSpec& tensor, Elems first, std::span<float> out) const;
  [[nodiscard]] const WeightFiles& files() const { return files_; }

  /// Name of the tensor in files of PEFT.
  [[nodiscard]] static std::string name_of(const model::TensorSpec& tensor);

 private:
  struct Stack {
    std::string name;
    std::shared_ptr<const StackedAdapter> adapter;
  };
  /// The adapter of all experts that has a part for the expert of `tensor`, which is A or B. Keeps
  /// two, because some threads may still read one while others read the next.
  [[nodiscard]] std::shared_ptr<const StackedAdapter> stack_of(
      const model::TensorSpec& tensor) const;

  WeightFiles files_;
  StackedOrder order_;
  mutable std::array<Stack, 2> stacks_;
  std::unique_ptr<std::mutex> mutex_ = std::make_unique<std::mutex>();
};

/// The file of the tensors in a PEFT folder. Throws Error(data) for a file of pickled tensors.
std::filesystem::path adapter_weights(const std::filesystem::path& folder);

/// The name of a subfolder of `folder` that is a PEFT folder, such as a checkpoint of a trainer or
/// one of several adapters. The last by name; empty if there is none.
std::string adapter_folder_below(const std::filesystem::path& folder);

/// Whether `folder` is a PEFT folder.
bool is_adapter_folder(const std::filesystem::path& folder);

/// The weights of a model with those of a PEFT folder merged into them, like PEFT's
/// merge_and_unload(): W + s B A, with DoRA multiplied by m / ||W + s B A||, and modules or rows of
/// tokens that are trained in full instead of the model's. Computed in fp32 and rounded once.
///
/// If the embedding and the output matrix are tied and the adapters change only one of them, or
/// each in another way, the merged model has both (unties()).
class MergedAdapters {
 public:
  /// `base`: the model, described by the config.json `description`; must outlive the object. Throws
  /// Error(data) naming the file and the tensor if the adapters do not fit, or if the merged model
  /// would compute something else than the adapters; Error(config) like
  /// config::read_merge_settings().
  MergedAdapters(const WeightFiles& base, const std::filesystem::path& folder,
                 const text::Json& description);

  /// Whether the merged model no longer ties the embedding and the output matrix.
  [[nodiscard]] bool unties() const { return unties_; }
  /// A tensor that the merged model has in addition to those of `base`: the previously tied output
  /// matrix.
  struct AddedTensor {
    std::string name;
    const WeightPlace* like = nullptr;  ///< the embedding, whose type and shape it has
  };
  [[nodiscard]] const std::optional<AddedTensor>& added() const { return added_; }

  /// The tensor of the model from which the merged tensor `name` is made.
  [[nodiscard]] const WeightPlace* source(const std::string& name) const;
  /// Whether the merged tensor differs from its source.
  [[nodiscard]] bool changes(const std::string& name) const { return changes_.contains(name); }
  /// Changes fp32 `values`, those of the source of the tensor `name` from element `first` on. With
  /// DoRA it first reads the whole tensor for its norms when `first` is 0. Uses all threads of the
  /// machine.
  void apply(const std::string& name, Elems first, std::span<float> values);

 private:
  /// Adds scale * left [rows, rank] * right [rank, columns] to rows of a tensor.
  struct RowsChange {
    std::size_t rows = 0;
    std::size_t rank = 0;
    float scale = 1.0F;
    std::vector<float> left;
    std::vector<float> right;
  };
  struct TensorChange {
    const WeightPlace* source = nullptr;       ///< weights of the model
    const WeightPlace* replacement = nullptr;  ///< weights of the adapters that replace the model's
    /// Adds scale * left [rows, rank] * right [rank, columns]; nothing if rank is 0.
    std::size_t rank = 0;
    float scale = 1.0F;
    std::vector<float> left;
    std::vector<float> right;
    const WeightPlace* magnitudes = nullptr;  ///< DoRA's magnitudes: [rows], or [columns] of a
                                              ///< transposed matrix
    bool of_columns = false;
    std::vector<float> dora_scales;  ///< factors of DoRA for rows or columns
    /// Products for some rows of a tensor with the maps of several experts, by their first row.
    std::map<Elems, RowsChange> parts;
    /// Rows of `rows` by row of the tensor, for trained tokens.
    std::map<Elems, Elems> tokens;
    const WeightPlace* rows = nullptr;
  };
  /// A tensor of the adapters' file: its `module`, and the rest of its name.
  struct AdapterTensor {
    const WeightPlace* place = nullptr;
    std::string module;
    std::string suffix;
  };

  [[nodiscard]] AdapterTensor part_of(const WeightPlace& place) const;
  void add(const AdapterTensor& part);
  void add_product(const AdapterTensor& part, bool embedding);
  // merged_experts.cpp
  /// The parameter with the maps of all experts whose adapter `part` belongs to; "": none.
  [[nodiscard]] std::string stack_of(const AdapterTensor& part) const;
  void add_stack(const AdapterTensor& part, const std::string& parameter);
  void add_to_rows(const AdapterTensor& part, const WeightPlace& place, RowsChange rows);
  void add_expert(const AdapterTensor& part, const WeightPlace& place);
  /// The tensor of the model for a name in transformers' class.
  [[nodiscard]] const WeightPlace* find_in_base(const std::string& name) const;
  void add_bias(const AdapterTensor& part);
  void add_tokens(const AdapterTensor& part);
  void replace(const AdapterTensor& part, const std::string& tensor);
  /// The change of the model's tensor `name`, which `part` belongs to.
  TensorChange& change_of(const AdapterTensor& part, const std::string& name);
  void check_complete() const;
  void find_ends(const text::Json& description);
  void untie();
  [[noreturn]] void refuse_tied(bool of_output) const;
  [[nodiscard]] const WeightPlace* sibling(const AdapterTensor& part,
                                           const std::string& suffix) const;

  void add_to(const TensorChange& change, Elems first, std::span<float> values) const;
  void add_parts_to(const TensorChange& change, Elems first, std::span<float> values) const;
  void put_tokens(const TensorChange& change, Elems first, std::span<float> values) const;
  void compute_dora_scales(TensorChange& change) const;

  const WeightFiles& base_;
  WeightFiles files_;
  config::MergeSettings settings_;
  std::map<std::string, TensorChange> changes_;  ///< by the name of the merged tensor
  std::string tokens_;                           ///< name of the embedding
  std::string output_;                           ///< name of the output matrix
  bool tied_ = false;
  bool unties_ = false;
  std::optional<AddedTensor> added_;
};

/// Returns the folder of the base model that the adapters in `folder` name. Throws Error(data) if
/// they name none, if it does not exist, or if it has adapters instead of a model.
std::filesystem::path base_of_adapters(const std::filesystem::path& folder);

}  // namespace ballast::formats
