#include <array>
#include <charconv>
#include <string_view>

#include <fmt/format.h>

#include "ballast/config/adapter_folder.h"
#include "ballast/core/error.h"
#include "ballast/formats/safetensors_header.h"
#include "ballast/text/files.h"
#include "ballast/text/json.h"

#include "src/formats/adapter_files.h"

namespace ballast::formats {
namespace {

using Shape = std::vector<std::uint64_t>;

/// Returns whether version "a.b.c" is before 0.19.1.
bool is_before_exchange(std::string_view version) {
  constexpr std::array<int, 3> kExchange = {0, 19, 1};
  std::array<int, 3> numbers = {};
  for (int& number : numbers) {
    const auto [end, error] = std::from_chars(version.begin(), version.end(), number);
    if (error != std::errc()) break;
    version.remove_prefix(static_cast<std::size_t>(end - version.begin()));
    if (!version.starts_with('.')) break;
    version.remove_prefix(1);
  }
  return numbers < kExchange;
}

/// Returns columns of all experts as matrices [experts, rows, rank].
std::vector<float> by_expert(const std::vector<float>& from, std::uint64_t rows,
                             std::uint64_t experts, std::uint64_t rank, bool adjacent) {
  std::vector<float> to(from.size());
  for (std::uint64_t row = 0; row < rows; ++row) {
    for (std::uint64_t e = 0; e < experts; ++e) {
      for (std::uint64_t j = 0; j < rank; ++j) {
        const std::uint64_t column = adjacent ? e * rank + j : j * experts + e;
        to[(e * rows + row) * rank + j] = from[row * experts * rank + column];
      }
    }
  }
  return to;
}

/// Transposes matrices [rows, columns] of all experts.
std::vector<float> transposed_each(std::span<const float> from, std::uint64_t experts,
                                   std::uint64_t rows, std::uint64_t columns) {
  std::vector<float> to;
  to.reserve(from.size());
  for (std::uint64_t e = 0; e < experts; ++e) {
    const auto one = transposed(from.subspan(e * rows * columns, rows * columns), rows, columns);
    to.insert(to.end(), one.begin(), one.end());
  }
  return to;
}

}  // namespace

StackedOrder StackedOrder::read(const std::filesystem::path& folder) {
  constexpr const char* kLayout = "lora_B_layout";
  const std::filesystem::path path = folder / config::kAdapterConfig;
  const text::Json json = text::parse_json(text::read_settings(path, "adapters"), path.string(),
                                           {.category = ErrorCategory::data});
  StackedOrder order;
  const text::Json* const version = json.find("peft_version");
  if (version != nullptr && version->is_string()) {
    order.exchanged = is_before_exchange(version->text());
  }
  const text::Json* const layout = json.find(kLayout);
  if (layout == nullptr || layout->is_null()) return order;
  order.by_expert = *layout == "expert_major";
  if (!order.by_expert && !(*layout == "rank_major")) {
    throw Error(ErrorCategory::data,
                fmt::format("{}: {} is {}; it must be \"rank_major\" (the order of PEFT) or "
                            "\"expert_major\"",
                            path.string(), kLayout, layout->compact()));
  }
  if (!order.exchanged) order.exchanged = false;
  return order;
}

StackedAdapter read_stacked_adapter(const WeightFiles& files, const std::string& a,
                                    const std::string& b, const StackedOrder& order,
                                    std::uint64_t experts, std::uint64_t in, std::uint64_t out) {
  const WeightPlace* const first = files.find(a);
  const WeightPlace* const second = files.find(b);
  if (first == nullptr || second == nullptr) {
    refuse_adapters(files, fmt::format("has no tensor '{}'", first == nullptr ? a : b));
  }
  const Shape& left = first->tensor->shape;
  const Shape& right = second->tensor->shape;
  const bool matrices = left.size() == 2 && right.size() == 2;
  const std::uint64_t rank = matrices ? left.front() / experts : 0;
  if (matrices && in == 0) in = right[0] == out ? left[1] : right[0];
  if (matrices && out == 0) out = left[1] == in ? right[0] : left[1];
  const auto fits = [&](std::uint64_t wide, std::uint64_t high) {
    return left == Shape{experts * rank, wide} && right == Shape{high, experts * rank};
  };
  const bool straight = fits(in, out);
  const bool crossed = order.can_be_exchanged && fits(out, in);
  if (rank == 0 || (!straight && !crossed)) {
    refuse_adapters(
        files, fmt::format("tensors '{}' and '{}' have shapes {} and {}, but {} experts "
                           "with maps [{}, {}] need [{} r, {}] and [{}, {} r]",
                           a, b, format_shape(left), format_shape(right), experts, out, in, experts,
                           in, out, experts));
  }
  if (straight && crossed && !order.exchanged) {
    refuse_adapters(files,
                    fmt::format("tensor '{}' may have the order of PEFT before or since 0.19.1, "
                                "because the maps are square; set peft_version in {} to the "
                                "version that wrote it",
                                a, config::kAdapterConfig));
  }
  const bool exchanged = straight && crossed ? *order.exchanged : crossed;
  StackedAdapter adapter = {experts, rank, in, out, read_whole(files, *first->tensor), {}};
  adapter.b = by_expert(read_whole(files, *second->tensor), exchanged ? in : out, experts, rank,
                        order.by_expert);
  if (!exchanged) return adapter;
  std::vector<float> own = transposed_each(adapter.b, experts, in, rank);
  adapter.b = transposed_each(adapter.a, experts, rank, out);
  adapter.a = std::move(own);
  return adapter;
}

}  // namespace ballast::formats
