#include <algorithm>
#include <array>
#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/formats/safetensors_header.h"

#include "src/formats/adapter_files.h"
#include "src/model/description/layer_rules.h"

// Merging of adapters of experts: of all experts of a layer together, as PEFT has them, into
// tensors of all experts or of each; and of single maps into tensors of all experts.

namespace ballast::formats {
namespace {

constexpr std::string_view kInside = ".base_layer";
constexpr std::string_view kExpertsEnd = ".experts";
constexpr std::string_view kGateUp = model::kStackedGateUp;
constexpr std::string_view kDown = model::kStackedDown;

/// Parts of names in transformers' classes, and those in the files of some families.
constexpr std::array<std::pair<std::string_view, std::string_view>, 3> kNamesInFiles = {
    {{".mlp.shared_experts.", ".mlp.shared_mlp."},
     {".mlp.gate.", ".mlp.router.gate."},
     {".mlp.", ".block_sparse_moe."}}};

/// Names of gate, up and down of an expert in files.
constexpr std::array<std::array<std::string_view, 3>, 2> kMaps = {
    {{"gate_proj", "up_proj", "down_proj"}, {"w1", "w3", "w2"}}};

std::vector<float> copy_of(std::span<const float> values) {
  return {values.begin(), values.end()};
}

bool names_parameter(const std::vector<std::string>& targets, const std::string& parameter) {
  return std::ranges::any_of(targets, [&](const std::string& target) {
    return parameter == target || parameter.ends_with("." + target);
  });
}

/// Adds the products of all experts to a stacked tensor. `rows`: of one expert, without factors.
/// `flipped`: an expert of the tensor is [in, out].
template <class Change, class Rows>
void add_experts(Change& change, const StackedAdapter& adapter, const Rows& rows, bool flipped) {
  for (std::uint64_t e = 0; e < adapter.experts; ++e) {
    Rows own = rows;
    own.left =
        flipped ? transposed(adapter.a_of(e), adapter.rank, adapter.in) : copy_of(adapter.b_of(e));
    own.right =
        flipped ? transposed(adapter.b_of(e), adapter.out, adapter.rank) : copy_of(adapter.a_of(e));
    change.parts.emplace(e * rows.rows, std::move(own));
  }
}

}  // namespace

const WeightPlace* MergedAdapters::find_in_base(const std::string& name) const {
  if (const WeightPlace* const found = base_.find(name)) return found;
  for (const auto& [own, stored] : kNamesInFiles) {
    const auto at = name.find(own);
    if (at == std::string::npos) continue;
    const std::string other =
        name.substr(0, at) + std::string(stored) + name.substr(at + own.size());
    if (const WeightPlace* const found = base_.find(other)) return found;
  }
  return nullptr;
}

std::string MergedAdapters::stack_of(const AdapterTensor& part) const {
  std::string_view module = part.module;
  const bool inside = module.ends_with(kInside);
  if (inside) module.remove_suffix(kInside.size());
  if (!module.ends_with(kExpertsEnd)) return "";
  const auto parameter = [&](std::string_view name) { return fmt::format("{}.{}", module, name); };
  if (inside) return parameter(kGateUp);
  const std::string inner = fmt::format("{}{}", module, kInside);
  if (sibling({part.place, inner, ""}, std::string(model::kFirstOfAdapter)) != nullptr)
    return parameter(kDown);
  for (const std::string_view name : {kGateUp, kDown}) {
    if (names_parameter(settings_.parameters, parameter(name))) return parameter(name);
  }
  refuse_adapters(files_,
                  fmt::format("tensor '{}' may belong to {} or {}; name one of them in "
                              "target_parameters of adapter_config.json",
                              part.place->tensor->name, parameter(kGateUp), parameter(kDown)));
}

void MergedAdapters::add_stack(const AdapterTensor& part, const std::string& parameter) {
  StackedOrder order = StackedOrder::read(files_.path().parent_path());
  const bool last = parameter.ends_with(kDown);
  const std::string& a = part.place->tensor->name;
  const std::string b =
      a.substr(0, a.size() - model::kFirstOfAdapter.size()) + std::string(model::kSecondOfAdapter);
  const auto read = [&](std::uint64_t experts, std::uint64_t in, std::uint64_t out) {
    return read_stacked_adapter(files_, a, b, order, experts, in, out);
  };
  const auto scale = static_cast<float>(settings_.scale_of(parameter));
  const auto check_rank = [&](const StackedAdapter& adapter) {
    if (adapter.rank == settings_.rank_of(parameter)) return;
    refuse_adapters(files_, fmt::format("tensor '{}' has rank {}, but adapter_config.json says {}",
                                        a, adapter.rank, settings_.rank_of(parameter)));
  };
  const WeightPlace* const whole = base_.find(parameter);
  if (whole != nullptr && whole->tensor->shape.size() == 3) {
    const auto& shape = whole->tensor->shape;
    // Classes whose experts have biases have parameters [experts, in, out].
    const bool flipped = base_.find(parameter + "_bias") != nullptr;
    order.can_be_exchanged = !flipped;
    const StackedAdapter adapter = read(shape[0], shape[flipped ? 1 : 2], shape[flipped ? 2 : 1]);
    check_rank(adapter);
    const RowsChange rows = {.rows = shape[1], .rank = adapter.rank, .scale = scale};
    return add_experts(change_of(part, parameter), adapter, rows, flipped);
  }
  const std::string before = parameter.substr(0, parameter.rfind('.') + 1);
  for (const auto& maps : kMaps) {
    const auto place_of = [&](std::uint64_t expert, std::string_view map) {
      return find_in_base(fmt::format("{}{}.{}.weight", before, expert, map));
    };
    const WeightPlace* const first = place_of(0, maps[last ? 2 : 0]);
    if (first == nullptr) continue;
    std::uint64_t experts = 1;
    while (place_of(experts, maps[last ? 2 : 0]) != nullptr) ++experts;
    const std::uint64_t high = first->tensor->shape[0];
    const StackedAdapter adapter = read(experts, first->tensor->shape[1], last ? high : 2 * high);
    check_rank(adapter);
    for (std::uint64_t e = 0; e < experts; ++e) {
      for (std::size_t half = 0; half < (last ? 1 : 2); ++half) {
        const WeightPlace* const place = place_of(e, maps[last ? 2 : half]);
        if (place == nullptr || place->tensor->shape != first->tensor->shape) {
          refuse_adapters(
              base_, fmt::format("expert {} of '{}' has not the shape of the first", e, before));
        }
        const auto own = adapter.b_of(e).subspan(half * high * adapter.rank, high * adapter.rank);
        add_to_rows(part, *place,
                    {high, adapter.rank, scale, copy_of(own), copy_of(adapter.a_of(e))});
      }
    }
    return;
  }
  refuse_adapters(files_, fmt::format("tensor '{}' belongs to '{}', which {} lacks", a, parameter,
                                      base_.path().string()));
}

/// Adds a product to the rows of `place`, which may be a part of a tensor of all experts.
void MergedAdapters::add_to_rows(const AdapterTensor& part, const WeightPlace& place,
                                 RowsChange rows) {
  TensorChange& change = change_of(part, place.whole().tensor->name);
  const Elems first = place.stack == nullptr ? 0 : place.first_in_whole();
  change.parts.emplace(first / place.tensor->shape.back(), std::move(rows));
}

void MergedAdapters::add_expert(const AdapterTensor& part, const WeightPlace& place) {
  const WeightPlace* const b = sibling(part, std::string(model::kSecondOfAdapter));
  const auto& shape = place.tensor->shape;
  const std::uint64_t rank = settings_.rank_of(part.module);
  using Shape = std::vector<std::uint64_t>;
  if (part.place->tensor->shape != Shape{rank, shape[1]} || b == nullptr ||
      b->tensor->shape != Shape{shape[0], rank} || settings_.dora) {
    refuse_adapters(files_, fmt::format("'{}' has no A and B of rank {} for the model's map of "
                                        "shape {}{}",
                                        part.module, rank, format_shape(shape),
                                        settings_.dora ? ", or is DoRA of experts" : ""));
  }
  RowsChange rows = {shape[0], rank, static_cast<float>(settings_.scale_of(part.module)), {}, {}};
  rows.left.resize(b->tensor->elements);
  files_.read(b->tensor->name, rows.left);
  rows.right.resize(part.place->tensor->elements);
  files_.read(part.place->tensor->name, rows.right);
  add_to_rows(part, place, std::move(rows));
}

void MergedAdapters::add_parts_to(const TensorChange& change, Elems first,
                                  std::span<float> values) const {
  if (change.parts.empty()) return;
  const Elems columns = change.source->tensor->shape.back();
  std::vector<float> sums;
  while (!values.empty()) {
    const Elems row = first / columns;
    const Elems column = first % columns;
    const std::size_t count = std::min<std::size_t>(values.size(), columns - column);
    auto found = change.parts.upper_bound(row);
    if (found != change.parts.begin() &&
        row - std::prev(found)->first < std::prev(found)->second.rows) {
      const RowsChange& own = std::prev(found)->second;
      const float* const left = own.left.data() + (row - std::prev(found)->first) * own.rank;
      sums.assign(count, 0.0F);
      for (std::size_t k = 0; k < own.rank; ++k) {
        const float* const right = own.right.data() + k * columns + column;
        for (std::size_t i = 0; i < count; ++i) sums[i] += left[k] * right[i];
      }
      for (std::size_t i = 0; i < count; ++i) values[i] += own.scale * sums[i];
    }
    values = values.subspan(count);
    first += count;
  }
}

}  // namespace ballast::formats
