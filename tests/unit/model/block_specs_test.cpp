// Compares the blocks of models with tests/data/block_specs.txt: names, shapes, places in files and
// in memory, first values and costs of all tensors.

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include "ballast/core/error.h"
#include "ballast/model/architecture.h"

#include "tests/unit/model/golden_table.h"
#include "tests/unit/model/net_models.h"

namespace ballast::model_net {
namespace {

using model::Architecture;
using model::BlockSpec;
using model::TensorSpec;

std::string text_of_tensor(const TensorSpec& t) {
  const model::StoredRows& s = t.stored;
  return fmt::format(
      "  {} [{}] at {} size {} rows {} of {} columns {} of {} init {} {:.6g} stored {} {} {} {} {} "
      "flags {:d}{:d}{:d}{:d}{:d}{:d}\n",
      t.name, fmt::join(t.shape, ", "), t.offset, t.size, t.first_row, t.rows_in_all,
      t.first_column, t.columns_in_all, static_cast<int>(t.init), t.stddev, s.parts, s.groups,
      s.as_columns, s.stacked, s.addends, t.frozen, t.buffer, t.table, t.quantized, t.adapter,
      t.undecayed);
}

std::string text_of_block(const BlockSpec& b) {
  std::string text = fmt::format(
      "{}: kind {} part {} layer {} expert {} pieces {} number {} step {} prefix '{}'\n", b.name,
      static_cast<int>(b.kind), static_cast<int>(b.content), b.layer, b.expert, b.pieces, b.number,
      b.number_step, b.prefix);
  text += fmt::format("  elements {} parameters {} frozen {} quantized {}\n", b.elements,
                      b.parameters, b.frozen_elements, b.quantized_elements);
  text += fmt::format(
      "  products {} last {} frozen {} repeated {} norms {} {} share {:.6g} adapters {} {} {} "
      "attention {} {} recurrence {}\n",
      b.product_elements, b.last_product_elements, b.frozen_product_elements,
      b.repeated_product_elements, b.norm_elements, b.norm_product_elements, b.token_share,
      b.adapter_values.forward, b.adapter_values.backward, b.adapter_values.recomputed,
      b.attention_width, b.attention_window, b.recurrent_products);
  for (const TensorSpec& tensor : b.tensors) text += text_of_tensor(tensor);
  return text;
}

std::string text_of_model(const Architecture& model) {
  std::string text;
  for (const BlockSpec& block : model.blocks) text += text_of_block(block);
  return text;
}

/// Ways to cut a model, as overrides of its config and the number of ranks.
struct Cut {
  std::string_view name;
  std::vector<std::string> overrides;
  std::uint64_t ranks = 1;
};
const std::vector<Cut>& cuts() {
  static const std::vector<Cut> kAll = {
      {"whole", {"model.layer_tiles=1", "model.vocabulary_tiles=1"}},
      {"tiles_2", {"model.layer_tiles=2", "model.vocabulary_tiles=2"}},
      {"tiles_3", {"model.layer_tiles=3", "model.vocabulary_tiles=3"}},
      {"experts_2", {"ballast.expert_parallel=2"}, 2},
      {"tensor_2",
       {"model.layer_tiles=4", "model.vocabulary_tiles=4", "tensor_parallel.autotp_size=2"},
       2},
      {"lora",
       {"ballast.train=adapters", R"(ballast.adapters={"rank": 4, "targets": "all-linear"})"}},
      {"nf4",
       {"ballast.train=adapters", R"(ballast.adapters={"rank": 4, "targets": "all-linear"})",
        "ballast.quantized_base=nf4"}}};
  return kAll;
}

std::vector<std::string_view> cut_names() {
  std::vector<std::string_view> names;
  for (const Cut& cut : cuts()) names.push_back(cut.name);
  return names;
}

/// Returns "" if the model cannot be cut so.
std::string text_of_cut(const SmallModel& small, const Cut& cut) {
  const auto made = configure(small, cut.overrides, cut.name != "whole", cut.ranks);
  return made ? text_of_model(made->model) : "";
}

/// Returns the blocks of an example cut in tiles, or "" if its layers cannot be.
std::string text_of_example(model::ModelConfig changed, const Cut& cut) {
  model::RankSplit split;
  if (cut.name == "whole") changed.layer_tiles = changed.vocabulary_tiles = 1;
  if (cut.name == "tiles_2") changed.layer_tiles = changed.vocabulary_tiles = 2;
  if (cut.name == "tiles_3") changed.layer_tiles = changed.vocabulary_tiles = 3;
  if (cut.name == "experts_2") split.experts = 2;
  if (cut.name == "tensor_2") {
    split.tensor = 2;
    changed.layer_tiles = changed.vocabulary_tiles = 4;
  }
  try {
    return text_of_model(build_architecture(changed, split));
  } catch (const Error&) {
    return "";
  }
}

std::vector<GoldenRow> rows_of_blocks() {
  std::vector<GoldenRow> rows;
  for (const SmallModel& small : small_models()) {
    GoldenRow& row = rows.emplace_back(GoldenRow{small.name, {}});
    for (const Cut& cut : cuts()) row.texts.push_back(text_of_cut(small, cut));
  }
  for (const auto& [name, model] : example_models()) {
    GoldenRow& row = rows.emplace_back(GoldenRow{"example/" + name, {}});
    for (const Cut& cut : cuts()) {
      const bool adapted = cut.name == "lora" || cut.name == "nf4";
      row.texts.push_back(adapted ? "" : text_of_example(model.config, cut));
    }
  }
  return rows;
}

TEST(BlockSpecs, AreThoseOfTheFile) {
  compare_with_file(block_specs());
}

}  // namespace

const GoldenTable& block_specs() {
  static const GoldenTable kTable = {"block_specs.txt", cut_names(), &rows_of_blocks};
  return kTable;
}

}  // namespace ballast::model_net
