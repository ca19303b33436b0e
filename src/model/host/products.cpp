#include "src/model/host/products.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include <dnnl.hpp>
#include <fmt/format.h>

#include "ballast/core/error.h"

#include "src/model/host/bf16_kernels.h"
#include "src/model/host/kernel_tables.h"
#include "src/model/host/team.h"

namespace ballast::model::host {
namespace {

using Memory = dnnl::memory;
using Dimension = dnnl::memory::dim;

struct Primitive {
  Memory::desc a, b, c, bias, scratchpad;
  dnnl::matmul matmul;
  bool is_blocked = false;  ///< oneDNN's blocked implementation ("brg"), not its general one
};

ProductKey key_of(const Extents& e, const Matrix& a, const Matrix& b, const Matrix& c,
                  bool add_to_c, bool with_bias) {
  return product_key(
      e, a, b, c, static_cast<std::size_t>(add_to_c) | static_cast<std::size_t>(with_bias) << 1U);
}

Memory::data_type data_type(DType type) {
  switch (type) {
    case DType::f32:
      return Memory::data_type::f32;
    case DType::bf16:
      return Memory::data_type::bf16;
    case DType::f16:
      break;  // always widened
  }
  return Memory::data_type::f16;
}

Memory::desc describe(const Matrix& m, std::size_t rows, std::size_t columns) {
  return {{static_cast<Dimension>(rows), static_cast<Dimension>(columns)},
          data_type(m.type),
          Memory::dims{static_cast<Dimension>(m.row_step), static_cast<Dimension>(m.column_step)}};
}

const dnnl::engine& cpu() {
  static const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  return engine;
}

/// Chooses an implementation for these operands. oneDNN 2 describes a product first.
template <class Product = dnnl::matmul, class... Operands>
auto choose(const dnnl::primitive_attr& attributes, const Operands&... operands) {
  using Chosen = typename Product::primitive_desc;
  if constexpr (requires { typename Product::desc; }) {
    return Chosen(typename Product::desc(operands...), attributes, cpu());
  } else {
    return Chosen(cpu(), operands..., attributes);
  }
}

Primitive make(const Extents& e, const Matrix& a, const Matrix& b, const Matrix& c, bool add_to_c,
               bool with_bias) {
  Primitive made;
  made.a = describe(a, e.m, e.k);
  made.b = describe(b, e.k, e.n);
  made.c = describe(c, e.m, e.n);
  dnnl::primitive_attr attributes;
  // The primitive's built-in scratchpad would be shared by all threads that execute it
  // concurrently.
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  if (add_to_c) {
    dnnl::post_ops add;
    add.append_sum(1.0F);
    attributes.set_post_ops(add);
  }
  const auto finish = [&](const dnnl::matmul::primitive_desc& chosen) {
    made.scratchpad = chosen.scratchpad_desc();
    made.matmul = dnnl::matmul(chosen);
    made.is_blocked = std::string_view(chosen.impl_info_str()).starts_with("brg");
    return made;
  };
  if (!with_bias) return finish(choose(attributes, made.a, made.b, made.c));
  const auto width = static_cast<Dimension>(e.n);
  made.bias = Memory::desc({1, width}, data_type(a.type), Memory::dims{width, 1});
  return finish(choose(attributes, made.a, made.b, made.bias, made.c));
}

void execute(const Primitive& primitive, const Matrix& a, const Matrix& b, const Matrix& c,
             const void* bias) {
  thread_local dnnl::stream stream(cpu());
  thread_local dnnl::memory scratchpad;
  const Bytes needed = primitive.scratchpad.get_size();
  if (needed > 0 && (!scratchpad || scratchpad.get_desc().get_size() < needed)) {
    scratchpad = Memory(primitive.scratchpad, cpu());
  }
  const auto memory = [](const Memory::desc& what, const void* data) {
    return Memory(what, cpu(), const_cast<void*>(data));
  };
  std::unordered_map<int, Memory> arguments = {{DNNL_ARG_SRC, memory(primitive.a, a.data)},
                                               {DNNL_ARG_WEIGHTS, memory(primitive.b, b.data)},
                                               {DNNL_ARG_DST, memory(primitive.c, c.data)}};
  if (needed > 0) {
    arguments.emplace(DNNL_ARG_SCRATCHPAD,
                      memory(primitive.scratchpad, scratchpad.get_data_handle()));
  }
  if (bias != nullptr) arguments.emplace(DNNL_ARG_BIAS, memory(primitive.bias, bias));
  primitive.matmul.execute(stream, arguments);
  stream.wait();
}

/// Returns whether oneDNN multiplies bf16 on this CPU.
bool has_bf16() {
  static const bool has = [] {
    const Matrix m{nullptr, DType::bf16, 16, 1};
    try {
      make({16, 16, 16}, m, m, m, false, false);
      return true;
    } catch (const dnnl::error&) {
      return false;
    }
  }();
  return has;
}

template <class T>
const RowKernels<T>& best_rows() {
  static const RowKernels<T>& rows = best_kernels<T>().rows;
  return rows;
}

/// An fp32 copy of a 16-bit matrix, without gaps and with the same row or column order.
struct WidenedMatrix {
  Matrix matrix;
  std::size_t outer;  ///< rows of the copy
  std::size_t inner;  ///< length of a row
  std::size_t step;   ///< row stride of the original, in elements

  WidenedMatrix(const Matrix& m, std::size_t rows, std::size_t columns) : matrix(m) {
    const bool by_rows = m.column_step == 1;
    outer = by_rows ? rows : columns;
    inner = by_rows ? columns : rows;
    step = by_rows ? m.row_step : m.column_step;
    if (m.type == DType::f32) return;
    matrix.type = DType::f32;
    matrix.row_step = by_rows ? inner : 1;
    matrix.column_step = by_rows ? 1 : inner;
  }

  /// Copies the values of `from` to `buffer` and points the copy there.
  void load(const Matrix& from, std::vector<float>& buffer, bool with_values = true) {
    if (from.type == DType::f32) return;
    buffer.resize(std::max(buffer.size(), outer * inner));
    matrix.data = buffer.data();
    if (!with_values) return;
    with_training_type(from.type, [&](auto value) {
      using T = decltype(value);
      const auto* const rows = static_cast<const T*>(from.data);
      split(outer, 1, [&](Range here) {
        for (std::size_t i = here.begin; i < here.end; ++i) {
          best_rows<T>().widen(rows + i * step, buffer.data() + i * inner, inner);
        }
      });
    });
  }
  /// Rounds the copy back.
  void store(const Matrix& to, const std::vector<float>& buffer) const {
    if (to.type == DType::f32) return;
    with_training_type(to.type, [&](auto value) {
      using T = decltype(value);
      auto* const rows = static_cast<T*>(const_cast<void*>(to.data));
      split(outer, 1, [&](Range here) {
        best_rows<T>().convert(buffer.data() + here.begin * inner, inner, rows + here.begin * step,
                               step, here.size(), inner);
      });
    });
  }
};

/// The operands of a product, widened.
struct WidenedProduct {
  WidenedMatrix a, b, c;
  WidenedProduct(const Extents& e, const Matrix& a_in, const Matrix& b_in, const Matrix& c_in)
      : a(a_in, e.m, e.k), b(b_in, e.k, e.n), c(c_in, e.m, e.n) {}

  /// Calls multiply(a, b, c, bias) on the copies.
  template <class Multiply>
  void run(const Extents& e, const Matrix& a_in, const Matrix& b_in, const Matrix& c_in,
           bool add_to_c, const void* bias, const Multiply& multiply) {
    thread_local std::array<std::vector<float>, 4> buffers;
    a.load(a_in, buffers[0]);
    b.load(b_in, buffers[1]);
    c.load(c_in, buffers[2], add_to_c);
    if (bias != nullptr && a_in.type != DType::f32) {
      WidenedMatrix row({bias, a_in.type, e.n, 1}, 1, e.n);
      row.load({bias, a_in.type, e.n, 1}, buffers[3]);
      bias = row.matrix.data;
    }
    multiply(a.matrix, b.matrix, c.matrix, bias);
    c.store(c_in, buffers[2]);
  }
};

/// Longest sum of a product whose first matrix is transposed, such as a weight gradient, that has
/// the same bits for every number of threads on CPUs with AVX-512. oneDNN splits sums of 2 * kDepth
/// or more terms between threads.
constexpr std::size_t kDepth = 1024;

/// Calls part(first, count) for each part of the sums. Parts are computed one after the other.
template <class Part>
void for_depths(const Extents& e, const Matrix& a, const Matrix& c, const Part& part) {
  std::size_t first = 0;
  if (a.column_step != 1 && c.type == DType::f32) {
    for (; e.k - first >= 2 * kDepth; first += kDepth) part(first, kDepth);
  }
  part(first, e.k - first);
}

/// Tiles start at multiples of this many rows and columns.
constexpr std::size_t kUnit = 16;

/// Returns whether a product of bf16 matrices is a weight gradient that oneDNN's general
/// implementation computes faster than its blocked one, which adds to the result in a second pass,
/// and 3 to 5% faster than Ballast's own kernels.
bool is_gradient(const Extents& e, const Matrix& a, const Matrix& c) {
  return a.type == DType::bf16 && a.column_step != 1 && c.type == DType::f32 &&
         e.m >= 2 * kShortestSide && e.n >= kShortestSide && e.k >= kShortestSide;
}

/// Returns whether Ballast's own kernels multiply these matrices. AMX, where the CPU has it, is
/// faster.
bool is_own(const Matrix& a, const Matrix& b) {
  static const bool has =
      bf16_kernels() != nullptr && dnnl::get_effective_cpu_isa() == dnnl::cpu_isa::avx512_core_bf16;
  return has && a.type == DType::bf16 && b.type == DType::bf16;
}

/// Returns the instruction set of oneDNN's products, and whether their bits are the same for every
/// number of threads. For AMX, oneDNN 3 and others this is untested and counts as false.
std::pair<std::string, bool> instruction_set() {
  constexpr bool kIsTested = DNNL_VERSION_MAJOR == 2;
  switch (dnnl::get_effective_cpu_isa()) {
    case dnnl::cpu_isa::avx2:
      return {"AVX2", false};
    case dnnl::cpu_isa::avx512_core:
      return {"AVX-512", kIsTested};
    case dnnl::cpu_isa::avx512_core_vnni:
      return {"AVX-512 VNNI", kIsTested};
    case dnnl::cpu_isa::avx512_core_bf16:
      return {"AVX-512 bf16", kIsTested};
    case dnnl::cpu_isa::avx512_core_amx:
      return {"AMX", false};
    default:
      return {"another instruction set", false};
  }
}

bool must_widen(const Matrix& a, const Matrix& b, const Matrix& c) {
  const auto has = [&](DType type) { return a.type == type || b.type == type || c.type == type; };
  return has(DType::f16) || (has(DType::bf16) && !has_bf16());
}

[[noreturn]] void fail(const Extents& e, const dnnl::error& error) {
  throw Error(ErrorCategory::device, "matrix product " + std::to_string(e.m) + " x " +
                                         std::to_string(e.n) + " x " + std::to_string(e.k) +
                                         ": oneDNN: " + error.what());
}

}  // namespace

struct Products::Cache {
  using Primitives = std::unordered_map<ProductKey, Primitive, ProductKeyHash>;
  Primitives primitives;
  Primitives of_tiles;  ///< for one thread each

  const Primitive& get(const Extents& e, const Matrix& a, const Matrix& b, const Matrix& c,
                       bool add_to_c, bool with_bias) {
    return get_from(primitives, e, a, b, c, add_to_c, with_bias);
  }
  const Primitive& get_of_tile(const Extents& e, const Matrix& a, const Matrix& b, const Matrix& c,
                               bool add_to_c, bool with_bias) {
    const SingleThreaded guard;
    return get_from(of_tiles, e, a, b, c, add_to_c, with_bias);
  }

 private:
  static const Primitive& get_from(Primitives& all, const Extents& e, const Matrix& a,
                                   const Matrix& b, const Matrix& c, bool add_to_c,
                                   bool with_bias) {
    const ProductKey key = key_of(e, a, b, c, add_to_c, with_bias);
    auto found = all.find(key);
    if (found == all.end()) found = all.emplace(key, make(e, a, b, c, add_to_c, with_bias)).first;
    return found->second;
  }
};

/// The general implementation may split sums between threads in any way, so each thread computes
/// tiles alone. In bf16 the order of a sum depends only on its length, so each thread has one tile.
/// In fp32 it also depends on the size of the tile, which is therefore fixed.
void Products::multiply_tiles(const Extents& e, const Matrix& a, const Matrix& b, const Matrix& c,
                              bool add_to_c, const void* bias) {
  struct Tile {
    const Primitive* primitive;
    Matrix a, b, c;
    const void* bias;
  };
  constexpr std::size_t kRows = 256;
  constexpr std::size_t kColumns = 512;
  // A gradient in one piece would be computed by the blocked implementation.
  const ProductGrid grid =
      a.type == DType::bf16
          ? grid_of(e, std::max<std::size_t>(team_size(), is_gradient(e, a, c) ? 2 : 1))
          : ProductGrid{(e.m + kRows - 1) / kRows, (e.n + kColumns - 1) / kColumns};
  std::vector<Tile> tiles;
  for (std::size_t i = 0; i < grid.rows; ++i) {
    const Range rows = range_in_steps(e.m, kUnit, grid.rows, i);
    for (std::size_t j = 0; j < grid.columns; ++j) {
      const Range columns = range_in_steps(e.n, kUnit, grid.columns, j);
      Tile tile = {nullptr, part_of(a, rows.begin, 0), part_of(b, 0, columns.begin),
                   part_of(c, rows.begin, columns.begin), bias};
      if (bias != nullptr) tile.bias = part_of({bias, a.type, e.n, 1}, 0, columns.begin).data;
      tile.primitive = &cache_->get_of_tile({rows.size(), columns.size(), e.k}, tile.a, tile.b,
                                            tile.c, add_to_c, bias != nullptr);
      tiles.push_back(tile);
    }
  }
  const std::size_t parts = std::min(team_size(), tiles.size());
  on_team(parts, [&](std::size_t part) {
    const SingleThreaded guard;
    const Range own = range_of(tiles.size(), parts, part);
    for (std::size_t i = own.begin; i < own.end; ++i) {
      execute(*tiles[i].primitive, tiles[i].a, tiles[i].b, tiles[i].c, tiles[i].bias);
    }
  });
}

bool has_own_bf16_products() {
  static const bool has =
      bf16_kernels() != nullptr && dnnl::get_effective_cpu_isa() == dnnl::cpu_isa::avx512_core_bf16;
  return has;
}

std::string describe_arithmetic(std::size_t threads) {
  constexpr int kOrderOfSums = 3;  // increases whenever products sum in another order
  const dnnl_version_t* const version = dnnl::version();
  const auto [name, independent] = instruction_set();
  return fmt::format("{} kernels and oneDNN {}.{} for {}{}, sums in order {}",
                     to_string(kernel_tables().back()->isa), version->major, version->minor, name,
                     independent ? "" : fmt::format(" on {} threads", threads), kOrderOfSums);
}

Products::Products() : cache_(std::make_unique<Cache>()) {}
Products::~Products() = default;

void Products::multiply(const Extents& extents, const Matrix& a, const Matrix& b, const Matrix& c,
                        bool add_to_c, const void* bias) {
  const auto direct = [&](const Matrix& a_in, const Matrix& b_in, const Matrix& c_in,
                          const void* bias_in) {
    const KernelClock clock(KernelGroup::product, {extents.m, extents.n, extents.k});
    if (instruction_set().second && is_gradient(extents, a_in, c_in)) {
      multiply_tiles(extents, a_in, b_in, c_in, add_to_c, bias_in);
      return;
    }
    if (is_own(a_in, b_in)) {
      multiply_bf16(extents, a_in, b_in, c_in, add_to_c, bias_in);
      return;
    }
    for_depths(extents, a_in, c_in, [&](std::size_t first, std::size_t count) {
      const Extents part = {extents.m, extents.n, count};
      const Matrix a_part = part_of(a_in, 0, first);
      const Matrix b_part = part_of(b_in, first, 0);
      const void* const bias_here = first == 0 ? bias_in : nullptr;
      const bool adds = add_to_c || first > 0;
      const Primitive& whole = cache_->get(part, a_part, b_part, c_in, adds, bias_here != nullptr);
      if (whole.is_blocked || !instruction_set().second) {
        execute(whole, a_part, b_part, c_in, bias_here);
      } else {
        multiply_tiles(part, a_part, b_part, c_in, adds, bias_here);
      }
    });
  };
  try {
    if (must_widen(a, b, c)) {
      const KernelClock clock(KernelGroup::widening);
      WidenedProduct(extents, a, b, c).run(extents, a, b, c, add_to_c, bias, direct);
    } else {
      direct(a, b, c, bias);
    }
  } catch (const dnnl::error& error) {
    fail(extents, error);
  }
}

void Products::prepare(const Extents& extents, const Matrix& a, const Matrix& b, const Matrix& c,
                       bool add_to_c) {
  try {
    if (must_widen(a, b, c)) {
      const WidenedProduct wide(extents, a, b, c);
      cache_->get(extents, wide.a.matrix, wide.b.matrix, wide.c.matrix, add_to_c, false);
    } else {
      cache_->get(extents, a, b, c, add_to_c, false);
    }
  } catch (const dnnl::error& error) {
    fail(extents, error);
  }
}

void Products::multiply_prepared(const Extents& extents, const Matrix& a, const Matrix& b,
                                 const Matrix& c, bool add_to_c) const {
  const auto direct = [&](const Matrix& a_in, const Matrix& b_in, const Matrix& c_in,
                          const void* /*bias*/) {
    const auto& primitives = cache_->primitives;
    const auto found = primitives.find(key_of(extents, a_in, b_in, c_in, add_to_c, false));
    expects(found != primitives.end(), "a matrix product was not prepared");
    execute(found->second, a_in, b_in, c_in, nullptr);
  };
  try {
    if (must_widen(a, b, c)) {
      WidenedProduct(extents, a, b, c).run(extents, a, b, c, add_to_c, nullptr, direct);
    } else {
      direct(a, b, c, nullptr);
    }
  } catch (const dnnl::error& error) {
    fail(extents, error);
  }
}

}  // namespace ballast::model::host
