#include "ballast/model/architecture.h"

#include <algorithm>

#include <fmt/format.h>

#include "ballast/core/dtype.h"
#include "ballast/core/error.h"

#include "src/model/description/layer_spec.h"

namespace ballast::model {
namespace {

/// Position of element `at` of a matrix [rows, columns] in its transpose. An entry of the matrix is
/// a run of elements; `size` counts all elements.
TensorRun transposed_run(Elems size, std::uint64_t rows, std::uint64_t columns, Elems at) {
  const Elems run = size / (rows * columns);
  const std::uint64_t row = at / run / columns;
  const std::uint64_t column = at / run % columns;
  const Elems inside = at % run;
  return {(column * rows + row) * run + inside, run - inside};
}

}  // namespace

const text::Json& ModelConfig::detail(std::string_view key) const {
  const auto found = details.find(key);
  expects(found != details.end(), "the model config lacks a key of the family");
  return found->second;
}

std::vector<std::uint64_t> TensorSpec::whole_shape() const {
  std::vector<std::uint64_t> whole = shape;
  if (stored.as_columns) std::reverse(whole.begin(), whole.end());
  if (stored.stacked > 0) {
    whole.insert(whole.begin(), stored.stacked);
    return whole;
  }
  if (!stored.as_columns) whole.front() = rows_in_all;
  if (stored.as_row) whole.insert(whole.begin(), 1);
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
  const StoredRows& stored = tensor.stored;
  if (tensor.cuts_rows()) {
    const Elems columns = tensor.size / tensor.shape.front();
    const Elems row = at / columns;
    const Elems column = at % columns;
    if (stored.column_step > 1) {
      const Elems there =
          transposed_run(tensor.shape.front(), stored.parts, stored.groups, row).first;
      return {tensor.first_element() + there * tensor.columns_in_all + column * stored.column_step,
              1};
    }
    return {tensor.first_element() + row * tensor.columns_in_all + column, columns - column};
  }
  if (stored.addends > 1) {
    const Elems values = tensor.size / stored.addends;
    return {at % values, values - at % values};
  }
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

void split_into_addends(const TensorSpec& tensor, Elems first, std::span<float> values) {
  if (tensor.stored.addends == 1) return;
  const Elems of_each = tensor.size / tensor.stored.addends;
  for (float& value : values) {
    float rest = value;
    for (Elems addend = 0; addend <= first / of_each; ++addend) {
      value = to_float(to_bf16(rest));
      rest -= value;
    }
    ++first;
  }
}

std::vector<float> sum_of_addends(const TensorSpec& tensor, std::span<const float> elements) {
  std::vector<float> sums(tensor.size / tensor.stored.addends);
  for (Elems i = 0; i < elements.size(); ++i) sums[i % sums.size()] += elements[i];
  return sums;
}

const LayerSpec& Architecture::layer(std::uint64_t index) const {
  return layers->at(index);
}

Elems Architecture::parameters() const {
  Elems sum = 0;
  for (const BlockSpec& block : blocks) sum += block.parameters;
  return sum;
}

double Architecture::attention_flops(std::size_t index, std::uint64_t sequences,
                                     std::uint64_t length) const {
  expects(index < blocks.size(), "attention_flops: no such block");
  const BlockSpec& block = blocks[index];
  const auto tokens = static_cast<double>(sequences) * static_cast<double>(length);
  if (block.recurrent_products > 0) {
    return 2.0 * tokens * static_cast<double>(block.recurrent_products);
  }
  // Two products (scores, weighted values), each over half of length x length, or with a window
  // over a band without its first corner.
  const auto whole = static_cast<double>(length);
  const double window = block.attention_window == 0
                            ? whole
                            : std::min(whole, static_cast<double>(block.attention_window));
  const double pairs_per_token = window - window * window / (2.0 * whole);
  return 4.0 * tokens * pairs_per_token * static_cast<double>(block.attention_width);
}

double Architecture::forward_flops(std::size_t index, std::uint64_t sequences,
                                   std::uint64_t length) const {
  expects(index < blocks.size(), "forward_flops: no such block");
  const BlockSpec& block = blocks[index];
  const auto tokens = static_cast<double>(sequences) * static_cast<double>(length);
  return 2.0 * block.token_share * tokens * static_cast<double>(block.product_elements) +
         attention_flops(index, sequences, length) +
         2.0 * static_cast<double>(block.norm_product_elements);
}

double Architecture::attention_output_flops(std::size_t index, std::uint64_t sequences,
                                            std::uint64_t length) const {
  const double attention = attention_flops(index, sequences, length);
  const BlockSpec& block = blocks[index];
  // The map is the last product of a half, which no backward pass recomputes.
  if (block.content != BlockContent::whole) return attention;
  const auto tokens = static_cast<double>(sequences) * static_cast<double>(length);
  return attention + 2.0 * tokens * static_cast<double>(block.attention_width) *
                         static_cast<double>(config.hidden_size);
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

}  // namespace ballast::model
