#include "ballast/cpu_adam/updater.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstring>
#include <string>

#include "ballast/core/error.h"
#include "ballast/core/machine.h"
#include "ballast/cpu_adam/optimizer.h"

#include "cpu_adam/arguments.h"
#include "cpu_adam/stream_copy.h"
#include "cpu_adam/variant.h"
#include "cpu_adam/workers.h"

namespace ballast::cpu_adam {

std::vector<std::string> optimizer_names() {
  std::vector<std::string> names;
  names.reserve(kOptimizers.size());
  for (const OptimizerRow& row : kOptimizers) names.emplace_back(row.name);
  return names;
}

Optimizer parse_optimizer(std::string_view name) {
  for (const OptimizerRow& row : kOptimizers) {
    if (row.name == name) return row.type;
  }
  const std::vector<std::string> names = optimizer_names();
  throw Error(ErrorCategory::usage, "unknown optimizer '" + std::string(name) +
                                        "'; choose one of: " + listed(names) +
                                        did_you_mean(name, names));
}

std::vector<Isa> available() {
  std::vector<Isa> found;
  for (const Variant* candidate : kVariants) {
    if (may_run(candidate->isa)) found.push_back(candidate->isa);
  }
  return found;
}

Isa active() {
  return available().back();
}

const Variant& variant(Isa isa) {
  std::string names;
  for (const Isa candidate : available()) {
    names += (names.empty() ? "" : ", ") + std::string(to_string(candidate));
    if (candidate != isa) continue;
    for (const Variant* compiled : kVariants) {
      if (compiled->isa == isa) return *compiled;
    }
  }
  throw Error(ErrorCategory::config, "CPU update: the instruction set " +
                                         std::string(to_string(isa)) +
                                         " is not available here; choose one of: " + names);
}

Bytes Traffic::bytes_of(std::string_view name) const {
  for (const Array& array : arrays) {
    if (array.name == name) return array.bytes;
  }
  return 0;
}

Bytes Traffic::bytes_per_element() const {
  Bytes sum = 0;
  for (const Array& array : arrays) {
    sum += (array.read ? array.bytes : 0) + (array.written ? array.bytes : 0);
  }
  return sum;
}

Bytes Traffic::stored_per_element() const {
  Bytes sum = 0;
  for (const Array& array : arrays) sum += array.bytes;
  return sum;
}

std::string Traffic::formula() const {
  std::string reads;
  std::string writes;
  for (const Array& array : arrays) {
    std::string term(" ");
    term.append(array.name).append(std::to_string(array.bytes));
    if (array.read) reads += term;
    if (array.written) writes += term;
  }
  const std::string sum = std::to_string(bytes_per_element());
  return "read" + reads + " + write" + writes + " = " + sum + " bytes/parameter";
}

Traffic traffic(Optimizer optimizer, Weights::Format weights, DType gradient,
                Moments::Format moments) {
  const ElementSizes sizes = sizes_of(optimizer, weights, gradient, moments);
  Traffic result = {.first_moment = sizes.first, .second_moment = sizes.second};
  const auto add = [&result](std::string_view name, std::size_t bytes, bool read, bool written) {
    if (bytes > 0) result.arrays.push_back({name, bytes, read, written});
  };
  add("w", sizes.main, true, true);
  add(sizes.loads_remainder ? "r" : "c", sizes.remainder_or_copy, sizes.loads_remainder, true);
  add("m", sizes.first, true, true);
  add("v", sizes.second, true, true);
  add("g", sizes.gradient, true, false);
  return result;
}

void compute_checks(const Bf16* weights, Elems count, std::uint16_t* values) {
  static const ChecksKernel checks = variant(active()).checks;
  const Elems blocks = count / WeightChecks::kBlock;
  checks(weights, blocks, values);
  const Elems done = blocks * WeightChecks::kBlock;
  if (done == count) return;
  std::array<Bf16, WeightChecks::kBlock> rest = {};
  std::memcpy(rest.data(), weights + done, (count - done) * sizeof(Bf16));
  checks(rest.data(), 1, values + blocks * WeightChecks::kColumns);
}

namespace {

/// The unit of work of threads and of the norm's partial sums, small enough that small shards keep
/// all threads busy. A thread updates neighbouring chunks in one call, which gains 4%.
constexpr Elems kChunk = Updater::kSmall;
static_assert(kChunk % Codes::kBlock == 0);

class Chunks {
 public:
  explicit Chunks(Elems size) : size_(size) {}

  [[nodiscard]] Elems count() const { return (size_ + kChunk - 1) / kChunk; }
  [[nodiscard]] Elems start(Elems chunk) const { return std::min(size_, chunk * kChunk); }
  /// Number of elements of chunks [first, last).
  [[nodiscard]] Elems length(Elems first, Elems last) const { return start(last) - start(first); }

 private:
  Elems size_;
};

template <class Pattern>
std::uint64_t count_non_finite(const void* gradient, Elems size, Pattern exponent) {
  const auto* patterns = static_cast<const Pattern*>(gradient);
  return static_cast<std::uint64_t>(
      std::count_if(patterns, patterns + size,
                    [exponent](Pattern bits) { return (bits & exponent) == exponent; }));
}

std::uint64_t count_non_finite(DType type, const void* gradient, Elems size) {
  if (type == DType::bf16) return count_non_finite<std::uint16_t>(gradient, size, 0x7f80);
  if (type == DType::f16) return count_non_finite<std::uint16_t>(gradient, size, 0x7c00);
  return count_non_finite<std::uint32_t>(gradient, size, 0x7f800000U);
}

/// Number of elements whose old values are copied at once: all arrays of a piece fit into a core's
/// cache, from which the update then reads them.
constexpr Elems kSavedPiece = Elems{8} * 1024;
static_assert(kSavedPiece % Codes::kBlock == 0);

/// Neighbouring small shards of about this many elements are one piece of work for a thread.
constexpr Elems kPiece = Elems{32} * 1024;
/// Elements that take about as long as calling step() for a shard.
constexpr Elems kCallCost = 512;

/// Copies elements [start, start + count) of `from` to `to`, except arrays that either of them
/// lacks.
void copy_piece(Optimizer optimizer, const Shard& from, const Shard& to, Elems start, Elems count) {
  const ElementSizes sizes = sizes_of(optimizer, from);
  const Streams source = piece_of(optimizer, from, start, count);
  const Streams target = piece_of(optimizer, to, start, count);
  const auto copy = [](void* into, const void* out_of, Elems bytes) {
    if (into != nullptr && out_of != nullptr) stream_copy(into, out_of, bytes);
  };
  copy(target.main, source.main, count * sizes.main);
  copy(target.remainder_or_copy, source.remainder_or_copy, count * sizes.remainder_or_copy);
  copy(target.first, source.first, count * sizes.first);
  copy(target.second, source.second, count * sizes.second);
  copy(target.first_exponents, source.first_exponents, Codes::exponents_of(count));
  copy(target.second_exponents, source.second_exponents, Codes::exponents_of(count));
}

/// Whether `saved` can hold the arrays of `shard`.
bool is_copy_of(const Shard& saved, const Shard& shard) {
  return saved.size == shard.size && saved.first_element == shard.first_element &&
         saved.weights.format == shard.weights.format &&
         saved.moments.format == shard.moments.format && saved.gradient.type == shard.gradient.type;
}

}  // namespace

struct Updater::Impl {
  const Variant& variant;
  Workers workers;

  /// Runs one update, in pieces unless `around` is null.
  void step(const Hyper& hyper, const Shard& shard, const PieceWork* around) const;
};

Updater::Updater(const UpdaterOptions& options)
    : impl_(new Impl{cpu_adam::variant(options.isa.value_or(active())),
                     Workers(options.threads, options.numa_node)}) {}
Updater::~Updater() = default;
Updater::Updater(Updater&&) noexcept = default;
Updater& Updater::operator=(Updater&&) noexcept = default;

void Updater::step(const Hyper& hyper, const Shard& shard) const {
  impl_->step(hyper, shard, nullptr);
}

void Updater::step(const Hyper& hyper, const Shard& shard, const Shard& saved) const {
  expects(is_copy_of(saved, shard), "optimizer update: the saved shard has another form");
  const PieceWork copies = {
      .before = [&](Elems first,
                    Elems count) { copy_piece(hyper.optimizer, shard, saved, first, count); },
      .after = [](Elems, Elems) { finish_stream_copies(); },
      .elements = kSavedPiece};
  impl_->step(hyper, shard, &copies);
}

void Updater::step(const Hyper& hyper, const Shard& shard, const PieceWork& around) const {
  impl_->step(hyper, shard, &around);
}

void Updater::Impl::step(const Hyper& hyper, const Shard& shard, const PieceWork* around) const {
  require_complete(hyper, shard);
  if (shard.size == 0) return;
  const auto kernel_of = [&](const auto& table) {
    return table[static_cast<int>(hyper.optimizer)][static_cast<int>(shard.weights.format)]
                [gradient_index(shard.gradient.type)];
  };
  const FusedKernel fused = kernel_of(variant.fused);
  const DefaultFloatingPoint for_the_coefficients;
  const Coefficients coefficients = coefficients_of(hyper);
  const Moments::Format moments = format_of_moments(hyper.optimizer, shard);
  const CompressedKernel compressed = moments == Moments::Format::bf16_first
                                          ? kernel_of(variant.bf16_first)
                                          : kernel_of(variant.blockwise8);
  const auto update_alike = [&](Elems start, Elems count, std::uint8_t undecayed) {
    Streams streams = piece_of(hyper.optimizer, shard, start, count);
    Coefficients keyed = undecayed == kUndecayed ? without_decay(coefficients) : coefficients;
    if (moments == Moments::Format::f32) return fused(keyed, streams);
    if (undecayed != kUndecayed) streams.undecayed = undecayed;
    key_draws(keyed, hyper.step, static_cast<std::uint32_t>((shard.first_element + start) >> 32));
    compressed(fused, keyed, streams);
  };
  const auto update = [&](Elems start, Elems count) {
    for_decays(shard, start, start + count, update_alike);
  };
  const Chunks chunks(shard.size);
  workers.for_ranges(chunks.count(), [&](Elems first, Elems last) {
    const Elems end = chunks.start(last);
    const Elems stride = around == nullptr ? end : around->elements;
    for (Elems start = chunks.start(first); start < end; start += stride) {
      const Elems stop = std::min(end, start + stride);
      if (around != nullptr) around->before(start, stop - start);
      for_pieces(shard.first_element, start, stop, update);
      if (around != nullptr) around->after(start, stop - start);
    }
  });
}

void Updater::restore(Optimizer optimizer, const Shard& shard, const Shard& saved) const {
  expects(is_copy_of(saved, shard), "optimizer update: the saved shard has another form");
  if (shard.size == 0) return;
  const Chunks chunks(shard.size);
  impl_->workers.for_ranges(chunks.count(), [&](Elems first, Elems last) {
    copy_piece(optimizer, saved, shard, chunks.start(first), chunks.length(first, last));
    finish_stream_copies();
  });
}

const std::vector<TouchWay>& touch_ways() {
  static const std::vector<TouchWay> ways = [] {
    std::vector<TouchWay> all;
    for (const bool streams : {false, true}) {
      for (const bool prefetches : {true, false}) {
        for (const Elems stretch : {TouchWay{}.stretch, Codes::kBlock, kChunk}) {
          all.push_back({stretch, prefetches, streams});
        }
      }
    }
    return all;
  }();
  return ways;
}

void Updater::touch(Optimizer optimizer, const Shard& shard, const TouchWay& way) const {
  const Elems size = shard.size / Codes::kBlock * Codes::kBlock;
  if (size == 0) return;
  require_complete(optimizer, shard);
  const Chunks chunks(size);
  impl_->workers.for_ranges(chunks.count(), [&](Elems first, Elems last) {
    const auto arrays = touched_arrays(optimizer, shard, chunks.start(first));
    const Elems rows = chunks.length(first, last) / Codes::kBlock;
    impl_->variant.touch(arrays.data(), arrays.size(), rows, way.stretch / kCacheLine,
                         way.prefetches, way.streams);
  });
}

GradientStats Updater::gradient_stats(const Gradient& gradient, Elems size) const {
  GradientStats stats;
  if (size == 0) return stats;
  expects(gradient.data != nullptr, "CPU update: a non-empty gradient has a null pointer");
  const SquaresKernel squares = impl_->variant.squares[gradient_index(gradient.type)];
  const auto* bytes = static_cast<const std::byte*>(gradient.data);
  const Chunks chunks(size);
  std::vector<double> sums(chunks.count());
  std::atomic<std::uint64_t> non_finite{0};
  const DefaultFloatingPoint for_the_total;
  impl_->workers.for_ranges(chunks.count(), [&](Elems first, Elems last) {
    for (Elems chunk = first; chunk < last; ++chunk) {
      const std::byte* from = bytes + chunks.start(chunk) * size_of(gradient.type);
      const Elems length = chunks.length(chunk, chunk + 1);
      sums[chunk] = squares(from, length);
      if (!std::isfinite(sums[chunk])) {
        non_finite += count_non_finite(gradient.type, from, length);
      }
    }
  });
  for (const double sum : sums) stats.sum_of_squares += sum;
  stats.non_finite = non_finite;
  return stats;
}

Mapping Updater::allocate(Bytes bytes) const {
  return impl_->workers.allocate(bytes);
}

void Updater::for_ranges(Elems count,
                         const std::function<void(Elems first, Elems last)>& range) const {
  impl_->workers.for_ranges(count, range);
}

void Updater::for_each(std::span<const Elems> sizes,
                       const std::function<void(std::size_t)>& work) const {
  std::vector<std::size_t> starts;
  for (std::size_t i = 0; i < sizes.size();) {
    if (sizes[i] > kSmall) {
      work(i++);
      continue;
    }
    starts.clear();
    for (Elems piece = kPiece; i < sizes.size() && sizes[i] <= kSmall; ++i) {
      if (piece >= kPiece) {
        starts.push_back(i);
        piece = 0;
      }
      piece += sizes[i] + kCallCost;
    }
    starts.push_back(i);
    impl_->workers.for_ranges(starts.size() - 1, [&](Elems first, Elems last) {
      for (std::size_t one = starts[first]; one < starts[last]; ++one) work(one);
    });
  }
}

Isa Updater::isa() const noexcept {
  return impl_->variant.isa;
}

int Updater::threads() const noexcept {
  return impl_->workers.threads();
}

}  // namespace ballast::cpu_adam
