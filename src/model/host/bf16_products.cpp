#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "ballast/core/memory.h"
#include "ballast/core/units.h"

#include "src/model/host/bf16_kernels.h"
#include "src/model/host/products.h"
#include "src/model/host/team.h"

namespace ballast::model::host {
namespace {

/// Terms of the sums of a tile between two loads of its sums. The operand of a tile's columns, a
/// panel, then fits the first-level cache. A sum of up to kMaxPanelTerms terms is faster in one
/// go, with a panel in the second-level cache. The bits of a product depend on these numbers.
constexpr std::size_t kPanelTerms = 256;
constexpr std::size_t kMaxPanelTerms = 3 * kPanelTerms;
std::size_t panel_terms(std::size_t terms) {
  return terms <= kMaxPanelTerms ? kMaxPanelTerms : kPanelTerms;
}
/// Extents of a block. One operand, whose rows are those of the result, fits the second-level
/// cache.
constexpr std::size_t kBlockRows = 86 * kBf16TileRows;
constexpr std::size_t kBlockTerms = kMaxPanelTerms;
constexpr std::size_t kBlockColumns = 16 * kBf16TileColumns;
/// Results of at least this size are written past the caches.
constexpr Bytes kLargeResult = 32 * kMiB;

/// Operands and sums of one thread.
struct Buffers {
  Bf16* a = nullptr;      ///< rows of a block
  Bf16* panel = nullptr;  ///< pairs of kMaxPanelTerms terms of a tile's columns
  float* sums = nullptr;  ///< [tile columns of a block][rows][kBf16TileColumns]

  explicit Buffers(Bump bump)
      : a(bump.take<Bf16>(kBlockRows * (kBlockTerms + 32))),
        panel(bump.take<Bf16>(kMaxPanelTerms * kBf16TileColumns)),
        sums(bump.take<float>(kBlockRows * kBlockColumns)),
        bytes(bump.used()) {}
  Bytes bytes;

  static Buffers& of_thread() {
    thread_local std::vector<std::byte> memory(Buffers(Bump()).bytes + kCacheLine);
    const auto start = reinterpret_cast<std::uintptr_t>(memory.data());
    thread_local Buffers buffers(Bump(memory.data() + (round_up(start, kCacheLine) - start)));
    return buffers;
  }
};

const Bf16* elements_of(const Matrix& m) {
  return static_cast<const Bf16*>(m.data);
}
const std::byte* bytes_of(const Bf16* elements) {
  return reinterpret_cast<const std::byte*>(elements);
}

/// Sums `terms` for the `rows` of a tile. `panel`: the pairs of these terms.
void sum_tile(const Bf16Kernels& kernels, const Bf16Rows& a, Range rows, Range terms,
              const Bf16* panel, float* sums, std::size_t sum_row, bool continues) {
  const Bf16* const first = a.first + rows.begin * a.row_step + terms.begin / 2 * a.pair_step;
  kernels.sum_tile[rows.size() - 1](
      {bytes_of(first), a.row_step * sizeof(Bf16), a.pair_step * sizeof(Bf16), bytes_of(panel),
       (terms.size() + 1) / 2},
      sums, sum_row, continues);
}

std::size_t ceil_of(std::size_t size, std::size_t step) {
  return (size + step - 1) / step;
}

/// Loads a part of a matrix into the second-level cache, a few lines at a time.
class PanelLoader {
 public:
  PanelLoader() = default;
  /// The whole part is loaded after `calls` calls.
  PanelLoader(const Matrix& m, Range rows, Range columns, std::size_t calls)
      : line_(static_cast<const std::byte*>(part_of(m, rows.begin, columns.begin).data)) {
    const bool by_rows = m.column_step == 1;
    rows_ = by_rows ? rows.size() : columns.size();
    step_ = (by_rows ? m.row_step : m.column_step) * size_of(m.type);
    lines_ = ceil_of((by_rows ? columns.size() : rows.size()) * size_of(m.type), kCacheLine);
    at_once_ = ceil_of(rows_ * lines_, calls);
  }
  void next() {
    for (std::size_t i = 0; i < at_once_ && rows_ > 0; ++i) {
      __builtin_prefetch(line_ + done_ * kCacheLine, 0, 2);
      if (++done_ < lines_) continue;
      done_ = 0;
      line_ += step_;
      --rows_;
    }
  }

 private:
  const std::byte* line_ = nullptr;  ///< first line of the next row
  std::size_t step_ = 0;             ///< bytes from row to row
  std::size_t lines_ = 0;            ///< per row
  std::size_t done_ = 0;             ///< lines of the next row that are loaded
  std::size_t rows_ = 0;             ///< rows left
  std::size_t at_once_ = 0;
};

/// The part of a product that one thread computes.
class BlockedProduct {
 public:
  BlockedProduct(const Extents& extents, const Matrix& a, const Matrix& b, const Matrix& c,
                 bool add_to_c, const void* bias)
      : extents_(extents),
        panel_terms_(panel_terms(extents.k)),
        a_(a),
        b_(b),
        c_(c),
        adds_(add_to_c),
        streams_(!add_to_c && c.type == DType::f32 &&
                 extents.m * extents.n * sizeof(float) >= kLargeResult &&
                 c.row_step * sizeof(float) % kCacheLine == 0 &&
                 reinterpret_cast<std::uintptr_t>(c.data) % kCacheLine == 0),
        bias_(static_cast<const Bf16*>(bias)) {}

  void multiply(Range rows, Range columns) {
    const std::size_t blocks = ceil_of(rows.size(), kBlockRows);
    for (std::size_t i = 0; i < blocks; ++i) {
      const Range some = in_steps(rows, kBf16TileRows, blocks, i);
      for (std::size_t first = columns.begin; first < columns.end; first += kBlockColumns) {
        multiply_block(some, {first, std::min(first + kBlockColumns, columns.end)});
      }
    }
    if (streams_) kernels_.end_streams();
  }

 private:
  static std::size_t tiles_of(Range rows) { return ceil_of(rows.size(), kBf16TileRows); }
  static Range in_steps(Range range, std::size_t step, std::size_t parts, std::size_t index) {
    const Range part = range_in_steps(range.size(), step, parts, index);
    return {range.begin + part.begin, range.begin + part.end};
  }

  void multiply_block(Range rows, Range columns) {
    std::size_t term = 0;
    do {
      const Range terms = {term, std::min(term + kBlockTerms, extents_.k)};
      load_rows(rows, terms);
      for (std::size_t first = columns.begin; first < columns.end; first += kBf16TileColumns) {
        multiply_columns(rows, {first, std::min(first + kBf16TileColumns, columns.end)}, terms,
                         columns);
      }
      term = terms.end;
    } while (term < extents_.k);
  }

  /// Multiplies some terms of the block's rows and of one tile's columns.
  void multiply_columns(Range rows, Range columns, Range terms, Range block) {
    const std::size_t before = terms.size() < extents_.k ? columns.begin - block.begin : 0;
    float* const sums = buffers_.sums + before * rows.size();
    std::size_t term = terms.begin;
    do {
      const Range some = {term, std::min(term + panel_terms_, terms.end)};
      pair_bf16(part_of(b_, some.begin, columns.begin), some.size(), columns.size(),
                buffers_.panel);
      PanelLoader next_panel = panel_after(some, columns, terms, block, tiles_of(rows));
      for (std::size_t row = 0; row < rows.size(); row += kBf16TileRows) {
        next_panel.next();
        const std::size_t count = std::min(kBf16TileRows, rows.size() - row);
        const bool last = some.end == extents_.k;
        if (last && adds_) {
          PanelLoader(c_, {rows.begin + row, rows.begin + row + count}, columns, 1).next();
        }
        float* const own = sums + row * kBf16TileColumns;
        sum_tile(kernels_, rows_, {row, row + count},
                 {some.begin - terms.begin, some.end - terms.begin}, buffers_.panel, own,
                 kBf16TileColumns, term > 0);
        if (last) finish(own, rows.begin + row, count, columns);
      }
      term = some.end;
    } while (term < terms.end);
  }

  /// Finds the pairs of the rows of `a`. They are copied if columns are contiguous, or if the last
  /// pair has one term.
  void load_rows(Range rows, Range terms) {
    const Bf16* const from = elements_of(part_of(a_, rows.begin, terms.begin));
    if (a_.column_step != 1) {
      rows_ = pair_bf16_columns(from, a_.column_step, terms.size(), rows.size(), buffers_.a);
      return;
    }
    rows_ = {from, a_.row_step};
    if (terms.size() % 2 == 0) return;
    rows_ = {buffers_.a, terms.size() + 1};
    for (std::size_t i = 0; i < rows.size(); ++i) {
      Bf16* const to = buffers_.a + i * rows_.row_step;
      std::memcpy(to, from + i * a_.row_step, terms.size() * sizeof(Bf16));
      to[terms.size()] = {};
    }
  }

  /// Prepares to load the operand of the panel after the one with `some` terms of `columns`.
  [[nodiscard]] PanelLoader panel_after(Range some, Range columns, Range terms, Range block,
                                        std::size_t calls) const {
    if (some.end < terms.end) {
      return {b_, {some.end, std::min(some.end + panel_terms_, terms.end)}, columns, calls};
    }
    if (columns.end == block.end) return {};
    return {b_,
            {terms.begin, std::min(terms.begin + panel_terms_, terms.end)},
            {columns.end, std::min(columns.end + kBf16TileColumns, block.end)},
            calls};
  }

  void finish(const float* sums, std::size_t row, std::size_t count, Range columns) const {
    const Bf16* const bias = bias_ == nullptr ? nullptr : bias_ + columns.begin;
    auto* const values = const_cast<void*>(part_of(c_, row, columns.begin).data);
    if (c_.type == DType::f32) {
      kernels_.finish_f32({sums, count, columns.size(), bias, static_cast<float*>(values),
                           c_.row_step, adds_, streams_});
    } else {
      kernels_.finish_bf16(
          {sums, count, columns.size(), bias, static_cast<Bf16*>(values), c_.row_step, adds_});
    }
  }

  Extents extents_;
  std::size_t panel_terms_;
  Matrix a_, b_, c_;
  bool adds_;
  bool streams_;
  const Bf16* bias_;
  const Bf16Kernels& kernels_ = *bf16_kernels();
  Buffers& buffers_ = Buffers::of_thread();
  Bf16Rows rows_;  ///< rows of the block
};

}  // namespace

void multiply_bf16(const Extents& extents, const Matrix& a, const Matrix& b, const Matrix& c,
                   bool add_to_c, const void* bias) {
  // Waking the team takes as long as this many products of two numbers.
  constexpr std::size_t kWaking = 1U << 19U;
  const std::size_t useful = extents.m * extents.n * extents.k / kWaking;
  const ProductGrid grid = grid_of(extents, std::clamp<std::size_t>(useful, 1, team_size()));
  const auto multiply = [&](std::size_t part) {
    BlockedProduct(extents, a, b, c, add_to_c, bias)
        .multiply(range_in_steps(extents.m, kBf16TileRows, grid.rows, part / grid.columns),
                  range_in_steps(extents.n, kBf16TileColumns, grid.columns, part % grid.columns));
  };
  if (grid.rows * grid.columns == 1) {
    multiply(0);
  } else {
    on_team(grid.rows * grid.columns, multiply);
  }
}

Bf16Pairs pair_bf16(const Matrix& b, std::size_t terms, std::size_t columns, Bf16* to) {
  const Bf16Kernels& kernels = *bf16_kernels();
  const Bf16* const from = elements_of(b);
  for (std::size_t first = 0; first < columns; first += kBf16TileColumns) {
    const std::size_t some = std::min(kBf16TileColumns, columns - first);
    Bf16* const panel = to + first * round_up(terms, 2);
    if (b.column_step == 1) {
      kernels.pair_rows(from + first, b.row_step, terms, some, kBf16TileColumns, panel);
    } else {
      kernels.pair_columns(from + first * b.column_step, b.column_step, terms, some, panel);
    }
  }
  return {to, terms};
}

Bf16Rows pair_bf16_columns(const Bf16* from, std::size_t row_step, std::size_t terms,
                           std::size_t rows, Bf16* to) {
  const std::size_t width = round_up(rows, 32);
  bf16_kernels()->pair_rows(from, row_step, terms, rows, width, to);
  return {to, 2, 2 * width};
}

void multiply_pairs(const Extents& e, const Bf16Rows& a, const Bf16Pairs& b, float* c,
                    std::size_t c_row, bool add_to_c) {
  const Bf16Kernels& kernels = *bf16_kernels();
  const std::size_t at_once = panel_terms(e.k);
  for (std::size_t column = 0; column < e.n; column += kBf16TileColumns) {
    const Bf16* const panel = b.first + column * round_up(b.terms, 2);
    for (std::size_t term = 0; term < e.k; term += at_once) {
      const Range terms = {term, std::min(term + at_once, e.k)};
      for (std::size_t row = 0; row < e.m; row += kBf16TileRows) {
        sum_tile(kernels, a, {row, std::min(row + kBf16TileRows, e.m)}, terms,
                 panel + term * kBf16TileColumns, c + row * c_row + column, c_row,
                 add_to_c || term > 0);
      }
    }
  }
}

}  // namespace ballast::model::host
