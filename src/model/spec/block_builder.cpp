#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ballast/core/error.h"
#include "ballast/model/family.h"

#include "src/model/spec/block_steps.h"

namespace ballast::model {

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

BlockBuilder& BlockBuilder::add_buffer(std::string_view name, std::uint64_t size, Init init) {
  add(name, {kAddends * size}, init);
  TensorSpec& tensor = block_.tensors.back();
  tensor.rows_in_all = size;
  tensor.stored.addends = kAddends;
  tensor.frozen = true;
  tensor.buffer = true;
  block_.parameters -= tensor.size - size;
  return *this;
}

BlockBuilder& BlockBuilder::add_repeated_products(Elems elements) {
  block_.product_elements += elements;
  block_.repeated_product_elements += elements;
  return *this;
}

BlockBuilder& BlockBuilder::repeated() {
  block_.repeated_product_elements += block_.tensors.back().size;
  return *this;
}

BlockBuilder& BlockBuilder::attend(std::uint64_t width, std::uint64_t window) {
  block_.attention_width = width;
  block_.attention_window = window;
  return *this;
}

BlockBuilder& BlockBuilder::recur(std::uint64_t width, std::uint64_t products) {
  block_.attention_width = width;
  block_.recurrent_products = products;
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

BlockBuilder& BlockBuilder::table() {
  TensorSpec& tensor = block_.tensors.back();
  tensor.table = true;
  block_.product_elements -= tensor.size;
  return *this;
}

BlockBuilder& BlockBuilder::without_prefix() {
  TensorSpec& tensor = block_.tensors.back();
  tensor.name = tensor.name.substr(block_.prefix.size());
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
  const bool has_buffers = std::any_of(block_.tensors.begin(), block_.tensors.end(),
                                       [](const TensorSpec& tensor) { return tensor.buffer; });
  if (has_buffers) arrange(block_);
  return std::move(block_);
}

}  // namespace ballast::model
