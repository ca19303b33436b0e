#include "src/model/host/products.h"

#include <array>
#include <string>
#include <unordered_map>

#include <dnnl.hpp>

#include "ballast/core/error.h"

namespace ballast::model::host {
namespace {

using Memory = dnnl::memory;
using Dimension = dnnl::memory::dim;

/// Everything a primitive depends on.
struct Key {
  std::array<std::size_t, 9> values;
  friend bool operator==(const Key&, const Key&) = default;
};

struct KeyHash {
  std::size_t operator()(const Key& key) const {
    std::size_t hash = 0xcbf29ce484222325U;
    for (const std::size_t value : key.values) hash = (hash ^ value) * 0x100000001b3U;
    return hash ^ (hash >> 29);
  }
};

struct Primitive {
  Memory::desc a, b, c, bias;
  dnnl::matmul matmul;
};

Key key_of(const Extents& e, const Matrix& a, const Matrix& b, const Matrix& c, bool add_to_c,
           bool with_bias) {
  const auto type = [](const Matrix& m) { return static_cast<std::size_t>(m.type); };
  const std::size_t flags = type(a) | type(b) << 4U | type(c) << 8U |
                            static_cast<std::size_t>(add_to_c) << 12U |
                            static_cast<std::size_t>(with_bias) << 13U;
  return {{e.m, e.n, e.k, a.row_step, a.column_step, b.row_step, b.column_step, c.row_step, flags}};
}

Memory::data_type data_type(DType type) {
  return type == DType::f32 ? Memory::data_type::f32 : Memory::data_type::bf16;
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
  if (add_to_c) {
    dnnl::post_ops add;
    add.append_sum(1.0F);
    attributes.set_post_ops(add);
  }
  if (with_bias) {
    const auto width = static_cast<Dimension>(e.n);
    made.bias = Memory::desc({1, width}, data_type(a.type), Memory::dims{width, 1});
    const dnnl::matmul::desc what(made.a, made.b, made.bias, made.c);
    made.matmul = dnnl::matmul(dnnl::matmul::primitive_desc(what, attributes, cpu()));
  } else {
    const dnnl::matmul::desc what(made.a, made.b, made.c);
    made.matmul = dnnl::matmul(dnnl::matmul::primitive_desc(what, attributes, cpu()));
  }
  return made;
}

void execute(const Primitive& primitive, const Matrix& a, const Matrix& b, const Matrix& c,
             const void* bias) {
  thread_local dnnl::stream stream(cpu());
  const auto memory = [](const Memory::desc& what, const void* data) {
    return Memory(what, cpu(), const_cast<void*>(data));
  };
  std::unordered_map<int, Memory> arguments = {{DNNL_ARG_SRC, memory(primitive.a, a.data)},
                                               {DNNL_ARG_WEIGHTS, memory(primitive.b, b.data)},
                                               {DNNL_ARG_DST, memory(primitive.c, c.data)}};
  if (bias != nullptr) arguments.emplace(DNNL_ARG_BIAS, memory(primitive.bias, bias));
  primitive.matmul.execute(stream, arguments);
  stream.wait();
}

[[noreturn]] void fail(const Extents& e, const dnnl::error& error) {
  throw Error(ErrorCategory::device, "matrix product " + std::to_string(e.m) + " x " +
                                         std::to_string(e.n) + " x " + std::to_string(e.k) +
                                         ": oneDNN says: " + error.what());
}

}  // namespace

struct Products::Cache {
  std::unordered_map<Key, Primitive, KeyHash> primitives;
};

Products::Products() : cache_(std::make_unique<Cache>()) {}
Products::~Products() = default;

void Products::multiply(const Extents& extents, const Matrix& a, const Matrix& b, const Matrix& c,
                        bool add_to_c, const void* bias) {
  const bool with_bias = bias != nullptr;
  const Key key = key_of(extents, a, b, c, add_to_c, with_bias);
  try {
    auto found = cache_->primitives.find(key);
    if (found == cache_->primitives.end()) {
      found = cache_->primitives.emplace(key, make(extents, a, b, c, add_to_c, with_bias)).first;
    }
    execute(found->second, a, b, c, bias);
  } catch (const dnnl::error& error) {
    fail(extents, error);
  }
}

void Products::prepare(const Extents& extents, const Matrix& a, const Matrix& b, const Matrix& c,
                       bool add_to_c) {
  const Key key = key_of(extents, a, b, c, add_to_c, false);
  if (cache_->primitives.contains(key)) return;
  try {
    cache_->primitives.emplace(key, make(extents, a, b, c, add_to_c, false));
  } catch (const dnnl::error& error) {
    fail(extents, error);
  }
}

void Products::multiply_prepared(const Extents& extents, const Matrix& a, const Matrix& b,
                                 const Matrix& c, bool add_to_c) const {
  const auto found = cache_->primitives.find(key_of(extents, a, b, c, add_to_c, false));
  expects(found != cache_->primitives.end(), "a matrix product was not prepared");
  try {
    execute(found->second, a, b, c, nullptr);
  } catch (const dnnl::error& error) {
    fail(extents, error);
  }
}

}  // namespace ballast::model::host
