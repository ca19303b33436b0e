#include "src/model/host/products.h"

#include <algorithm>
#include <array>
#include <string>
#include <unordered_map>
#include <vector>

#include <dnnl.hpp>

#include "ballast/core/error.h"

#include "src/model/host/kernels.h"
#include "src/model/host/team.h"

namespace ballast::model::host {
namespace {

using Memory = dnnl::memory;
using Dimension = dnnl::memory::dim;

struct Primitive {
  Memory::desc a, b, c, bias, scratchpad;
  dnnl::matmul matmul;
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

Primitive make(const Extents& e, const Matrix& a, const Matrix& b, const Matrix& c, bool add_to_c,
               bool with_bias) {
  Primitive made;
  made.a = describe(a, e.m, e.k);
  made.b = describe(b, e.k, e.n);
  made.c = describe(c, e.m, e.n);
  dnnl::primitive_attr attributes;
  // The primitive's own one would be shared by the threads that execute it at the same time.
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  if (add_to_c) {
    dnnl::post_ops add;
    add.append_sum(1.0F);
    attributes.set_post_ops(add);
  }
  const auto finish = [&](const dnnl::matmul::desc& what) {
    const dnnl::matmul::primitive_desc chosen(what, attributes, cpu());
    made.scratchpad = chosen.scratchpad_desc();
    made.matmul = dnnl::matmul(chosen);
    return made;
  };
  if (!with_bias) return finish({made.a, made.b, made.c});
  const auto width = static_cast<Dimension>(e.n);
  made.bias = Memory::desc({1, width}, data_type(a.type), Memory::dims{width, 1});
  return finish({made.a, made.b, made.bias, made.c});
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

/// Whether oneDNN multiplies bf16 on this CPU.
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

/// An fp32 copy of a 16-bit matrix without gaps, with the same row or column order.
struct Widened {
  Matrix matrix;
  std::size_t outer;  ///< rows of the copy
  std::size_t inner;  ///< their length
  std::size_t step;   ///< elements between rows of the original

  Widened(const Matrix& m, std::size_t rows, std::size_t columns) : matrix(m) {
    const bool by_rows = m.column_step == 1;
    outer = by_rows ? rows : columns;
    inner = by_rows ? columns : rows;
    step = by_rows ? m.row_step : m.column_step;
    if (m.type == DType::f32) return;
    matrix.type = DType::f32;
    matrix.row_step = by_rows ? inner : 1;
    matrix.column_step = by_rows ? 1 : inner;
  }

  /// Fills `buffer` with the values of `from` and points the copy there.
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
  Widened a, b, c;
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
      Widened row({bias, a_in.type, e.n, 1}, 1, e.n);
      row.load({bias, a_in.type, e.n, 1}, buffers[3]);
      bias = row.matrix.data;
    }
    multiply(a.matrix, b.matrix, c.matrix, bias);
    c.store(c_in, buffers[2]);
  }
};

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
  std::unordered_map<ProductKey, Primitive, ProductKeyHash> primitives;

  const Primitive& get(const Extents& e, const Matrix& a, const Matrix& b, const Matrix& c,
                       bool add_to_c, bool with_bias) {
    const ProductKey key = key_of(e, a, b, c, add_to_c, with_bias);
    auto found = primitives.find(key);
    if (found == primitives.end()) {
      found = primitives.emplace(key, make(e, a, b, c, add_to_c, with_bias)).first;
    }
    return found->second;
  }
};

Products::Products() : cache_(std::make_unique<Cache>()) {}
Products::~Products() = default;

void Products::multiply(const Extents& extents, const Matrix& a, const Matrix& b, const Matrix& c,
                        bool add_to_c, const void* bias) {
  const auto direct = [&](const Matrix& a_in, const Matrix& b_in, const Matrix& c_in,
                          const void* bias_in) {
    execute(cache_->get(extents, a_in, b_in, c_in, add_to_c, bias_in != nullptr), a_in, b_in, c_in,
            bias_in);
  };
  try {
    if (must_widen(a, b, c)) {
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
