#include "tools/bench/adam_data.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <string_view>
#include <thread>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/core/random.h"

namespace ballast::tools {
namespace {

using cpu_adam::Codes;
using cpu_adam::Gradient;
using cpu_adam::Moments;
using cpu_adam::Optimizer;
using cpu_adam::Weights;

/// Elements of the tile that is repeated, with varying scale, to fill the arrays.
constexpr Elems kTile = Elems{64} * 1024;

struct AdamLayout {
  std::string_view name;
  Weights::Format weights;
  DType gradient;
  Moments::Format moments;
};

constexpr std::array<AdamLayout, 6> kLayouts = {{
    {"bf16", Weights::Format::split, DType::bf16, Moments::Format::f32},
    {"fp32", Weights::Format::plain, DType::f32, Moments::Format::f32},
    {"master-bf16", Weights::Format::copy_bf16, DType::bf16, Moments::Format::f32},
    {"master-fp16", Weights::Format::copy_f16, DType::f16, Moments::Format::f32},
    {"bf16-m16", Weights::Format::split, DType::bf16, Moments::Format::bf16_first},
    {"bf16-8bit", Weights::Format::split, DType::bf16, Moments::Format::blockwise8},
}};

/// All variants, adamw first. Optimizers without a first moment have no bf16 variant.
std::vector<AdamVariant> make_variants() {
  std::vector<AdamVariant> variants;
  for (const cpu_adam::OptimizerRow& row : cpu_adam::kOptimizers) {
    const Optimizer optimizer = row.type;
    for (const AdamLayout& layout : kLayouts) {
      if (layout.moments == Moments::Format::bf16_first && !has_first_moment(optimizer)) continue;
      variants.push_back(
          {fmt::format("{}-{}", to_string(optimizer), layout.name), optimizer, layout.weights,
           layout.gradient, layout.moments,
           cpu_adam::traffic(optimizer, layout.weights, layout.gradient, layout.moments)});
    }
  }
  return variants;
}

std::vector<float> make_tile() {
  std::vector<float> tile(kTile);
  for (Elems i = 0; i < kTile; ++i) tile[i] = static_cast<float>(random_normal(1, i));
  return tile;
}

/// Calls `work` once for every piece, on `threads` threads.
void for_each_piece(Elems pieces, int threads, const std::function<void(Elems)>& work) {
  const auto count = static_cast<Elems>(threads);
  std::vector<std::jthread> workers;
  for (Elems first = 0; first < std::min(count, pieces); ++first) {
    workers.emplace_back([=, &work] {
      for (Elems piece = first; piece < pieces; piece += count) work(piece);
    });
  }
}

/// Fills arrays from one tile, each from a different offset, so that they differ.
class ArrayFiller {
 public:
  ArrayFiller(Elems size, int threads) : size_(size), threads_(threads), tile_(make_tile()) {}

  /// Calls store(i, x) for every element, with normally distributed x around `scale`.
  template <class Store>
  void fill(float scale, Store store) {
    shift_ += 4099;
    for_each_piece((size_ + kTile - 1) / kTile, threads_, [&](Elems piece) {
      const float piece_scale = scale * std::ldexp(1.0F, static_cast<int>(piece % 5) - 2);
      const Elems start = piece * kTile;
      const Elems end = std::min(size_, start + kTile);
      for (Elems i = start; i < end; ++i) {
        store(i, tile_[(i + shift_) % kTile] * piece_scale);
      }
    });
  }

 private:
  Elems size_;
  int threads_;
  Elems shift_ = 0;
  std::vector<float> tile_;
};

constexpr float kWeightScale = 0.02F;
constexpr float kGradientScale = 0.03F;

void fill_weights(ArrayFiller& filler, const Weights& weights) {
  if (weights.format == Weights::Format::split) {
    auto* weight = static_cast<Bf16*>(weights.main);
    auto* remainder = static_cast<std::uint16_t*>(weights.remainder_or_copy);
    filler.fill(kWeightScale, [=](Elems i, float x) {
      const SplitMaster split = split_master(x);
      weight[i] = split.weight;
      remainder[i] = split.remainder;
    });
  } else {
    auto* master = static_cast<float*>(weights.main);
    filler.fill(kWeightScale, [=](Elems i, float x) { master[i] = x; });
  }
}

/// Leaves 8-bit moments at zero, as in a new optimizer. The first steps set them.
void fill_moments(ArrayFiller& filler, const Moments& moments) {
  if (moments.format == Moments::Format::blockwise8) return;
  if (auto* first = static_cast<Bf16*>(moments.first);
      first != nullptr && moments.format == Moments::Format::bf16_first) {
    filler.fill(kGradientScale, [=](Elems i, float x) { first[i] = to_bf16(x); });
  } else if (auto* plain = static_cast<float*>(moments.first); plain != nullptr) {
    filler.fill(kGradientScale, [=](Elems i, float x) { plain[i] = x; });
  }
  if (auto* second = static_cast<float*>(moments.second); second != nullptr) {
    filler.fill(kGradientScale, [=](Elems i, float x) { second[i] = x * x; });
  }
}

void fill_gradient(ArrayFiller& filler, DType type, void* data) {
  if (type == DType::bf16) {
    auto* values = static_cast<Bf16*>(data);
    filler.fill(kGradientScale, [=](Elems i, float x) { values[i] = to_bf16(x); });
  } else if (type == DType::f16) {
    auto* values = static_cast<F16*>(data);
    filler.fill(kGradientScale, [=](Elems i, float x) { values[i] = to_f16(x); });
  } else {
    auto* values = static_cast<float*>(data);
    filler.fill(kGradientScale, [=](Elems i, float x) { values[i] = x; });
  }
}

/// Allocates the arrays of a shard, each in a separate mapping.
class Allocator {
 public:
  Allocator(const cpu_adam::Updater& updater, const AdamVariant& variant, Elems size,
            std::vector<Mapping>& mappings)
      : updater_(updater), variant_(variant), size_(size), mappings_(mappings) {}

  /// The array called `name` in the variant's traffic; null if the update has none.
  void* array(std::string_view name) {
    const Bytes each = variant_.traffic.bytes_of(name);
    return each == 0 ? nullptr : bytes(size_ * each);
  }
  std::uint8_t* exponents() {
    return static_cast<std::uint8_t*>(bytes(Codes::exponents_of(size_)));
  }

 private:
  void* bytes(Bytes count) {
    const Bytes skew = (mappings_.size() + 1) * cpu_adam::kArraySkew;
    mappings_.push_back(updater_.allocate(skew + count));
    return mappings_.back().bytes().data() + skew;
  }

  const cpu_adam::Updater& updater_;
  const AdamVariant& variant_;
  Elems size_;
  std::vector<Mapping>& mappings_;
};

cpu_adam::Shard make_shard(const cpu_adam::Updater& updater, const AdamVariant& variant, Elems size,
                           std::vector<Mapping>& mappings) {
  Allocator allocator(updater, variant, size, mappings);
  ArrayFiller filler(size, updater.threads());
  void* const main = allocator.array("w");
  const bool split = variant.weights == Weights::Format::split;
  const Weights weights(variant.weights, main, allocator.array(split ? "r" : "c"));
  Moments moments(variant.moments, allocator.array("m"), allocator.array("v"));
  if (moments.format == Moments::Format::blockwise8) {
    if (moments.first != nullptr) moments.first_exponents = allocator.exponents();
    if (moments.second != nullptr) moments.second_exponents = allocator.exponents();
  }
  void* gradient = allocator.array("g");
  fill_weights(filler, weights);
  fill_moments(filler, moments);
  fill_gradient(filler, variant.gradient, gradient);
  return {weights, moments, {variant.gradient, gradient}, size};
}

/// Upper bound of page rounding and skews of all arrays.
constexpr Bytes kSlack = 16 * (cpu_adam::kArraySkew * 8 + kPage);

}  // namespace

const AdamVariant& find_adam_variant(const std::string& name) {
  static const std::vector<AdamVariant> variants = make_variants();
  std::vector<std::string> names;
  for (const AdamVariant& variant : variants) {
    if (variant.name == name) return variant;
    names.push_back(variant.name);
  }
  std::string layouts;
  for (const AdamLayout& layout : kLayouts) {
    layouts += (layouts.empty() ? "" : ", ") + std::string(layout.name);
  }
  throw Error(
      ErrorCategory::usage,
      fmt::format("'{}' is not a variant{}; give OPTIMIZER-LAYOUT with one of the optimizers "
                  "{} and one of the layouts {} (bf16-m16 needs a first moment)",
                  name, did_you_mean(name, names), listed(cpu_adam::optimizer_names()), layouts));
}

Bytes AdamArrays::bytes_needed(const AdamVariant& variant, Elems size) {
  constexpr Bytes kMax = std::numeric_limits<Bytes>::max();
  const Bytes each = variant.traffic.stored_per_element();
  if (size > kMax / 2 / each) return kMax;
  return size * each + size / 64 + kSlack;
}

Elems AdamArrays::elements_in(const AdamVariant& variant, Bytes bytes) {
  if (bytes <= kSlack) return 0;
  // 1/64 for exponents, as in bytes_needed().
  return (bytes - kSlack) / (64 * variant.traffic.stored_per_element() + 1) * 64;
}

AdamArrays::AdamArrays(const cpu_adam::Updater& updater, const AdamVariant& variant, Elems size)
    : shard_(make_shard(updater, variant, size, mappings_)) {}

bool AdamArrays::copy_is_right(Elems index) const {
  const Weights& weights = shard_.weights;
  const auto master = [&] { return static_cast<const float*>(weights.main)[index]; };
  if (weights.format == Weights::Format::copy_bf16) {
    return static_cast<const Bf16*>(weights.remainder_or_copy)[index] == to_bf16(master());
  }
  if (weights.format == Weights::Format::copy_f16) {
    return static_cast<const F16*>(weights.remainder_or_copy)[index] == to_f16(master());
  }
  return true;
}

}  // namespace ballast::tools
