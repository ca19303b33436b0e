// Compares the memory that kernels need with tests/data/kernel_sizes.txt: all of KernelSizes for
// small models and for the config files that come with Ballast. Plans depend on every byte.

#include <algorithm>
#include <array>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "ballast/core/dtype.h"
#include "ballast/core/error.h"
#include "ballast/device/device.h"
#include "ballast/model/compute.h"

#include "tests/unit/model/golden_table.h"
#include "tests/unit/model/net_models.h"

namespace ballast::model_net {
namespace {

/// Numbers with the count of equal ones that follow each other: "0 12x4096 0".
std::string in_runs(const std::vector<Bytes>& values) {
  std::string text;
  for (std::size_t i = 0; i < values.size();) {
    std::size_t end = i;
    while (end < values.size() && values[end] == values[i]) ++end;
    text += fmt::format("{}{}{}", i == 0 ? "" : " ", end - i > 1 ? fmt::format("{}x", end - i) : "",
                        values[i]);
    i = end;
  }
  return text;
}

std::string text_of_sizes(const model::KernelSizes& sizes) {
  return fmt::format(
      "workspace {} rows {} sums {} experts {} router_totals {} intermediates [{}] attention [{}] "
      "cleared [{}]",
      sizes.workspace, sizes.rows, sizes.sums, sizes.experts, sizes.router_totals,
      in_runs(sizes.intermediates), in_runs(sizes.attention), in_runs(sizes.cleared));
}

std::string sizes_or_refusal(const model::Architecture& model, DType type,
                             model::MicroBatchShape shape, const std::string& kind) {
  try {
    return text_of_sizes(model::kernel_memory(model, type, shape, kind, 2));
  } catch (const Error& error) {
    return std::string("refused: ") + error.what();
  }
}

/// Adds the sizes of a model for one kind of device. Types with the same sizes share a row.
void add_rows(const std::string& name, const model::Architecture& model,
              std::vector<model::MicroBatchShape> shapes, const std::string& kind,
              std::vector<GoldenRow>& rows) {
  for (model::MicroBatchShape& shape : shapes) {
    if (!model.outer.positions.empty()) {
      shape.length = std::min(shape.length, model.config.max_sequence);
    }
    for (const DType type : {DType::f32, DType::bf16, DType::f16}) {
      const std::string text = sizes_or_refusal(model, type, shape, kind);
      if (type == DType::f16 && rows.back().texts.front() == text) {
        rows.back().name += "+f16";
        continue;
      }
      rows.push_back({fmt::format("{}/{}/{}x{}/{}", kind, name, shape.sequences, shape.length,
                                  to_string(type)),
                      {text}});
    }
  }
}

std::vector<std::string> kinds() {
  if (device::cuda_built_in()) return {"host", "cuda"};
  return {"host"};
}

std::vector<GoldenRow> rows_of_sizes() {
  std::vector<GoldenRow> rows;
  for (const std::string& kind : kinds()) {
    for (const SmallModel& small : small_models()) {
      const std::array<std::pair<std::string, std::vector<std::string>>, 2> forms = {
          {{"whole", {}}, {"tiles", {"model.layer_tiles=2", "model.vocabulary_tiles=2"}}}};
      for (const auto& [form, overrides] : forms) {
        const auto made = configure(small, overrides, form == "tiles");
        if (!made) continue;
        add_rows(small.name + "/" + form, made->model, {{2, 37}, {3, 2048}}, kind, rows);
      }
    }
    for (const auto& [name, model] : example_models()) {
      add_rows(name + "/example", model, {{1, 512}, {4, 4096}}, kind, rows);
    }
  }
  return rows;
}

TEST(KernelSizesOfModels, AreThoseOfTheFile) {
  compare_with_file(kernel_sizes());
}

}  // namespace

const GoldenTable& kernel_sizes() {
  static const GoldenTable kTable = {
      "kernel_sizes.txt", {"sizes"}, &rows_of_sizes, false, device::cuda_built_in() ? "" : "cuda/"};
  return kTable;
}

}  // namespace ballast::model_net
