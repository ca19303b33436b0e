#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <memory>
#include <utility>

#include "ballast/core/clocks.h"
#include "ballast/core/dtype.h"

#include "src/model/host/ops.h"
#include "src/model/host/products.h"
#include "src/model/host/team.h"

namespace ballast::model::host {
namespace {

template <class T>
class HostProducts final : public ProductOps<T> {
 public:
  explicit HostProducts(std::shared_ptr<ElementwiseOps<T>> elementwise)
      : elementwise_(std::move(elementwise)) {}

  void linear(const Linear<T>& layer, const T* x, T* y, std::size_t y_row,
              std::size_t rows) override {
    const Product p = forward_product(layer, x, y, y_row, rows);
    products_.multiply(p.extents, p.a, p.b, p.c, false, layer.bias);
  }
  void linear_onto(const Linear<T>& layer, const T* x, const T* residual, T* y,
                   std::size_t rows) override {
    split(KernelGroup::elementwise, rows * layer.out, kStep,
          [&](Range r) { std::memcpy(y + r.begin, residual + r.begin, r.size() * sizeof(T)); });
    const Product p = forward_product(layer, x, y, layer.out, rows);
    products_.multiply(p.extents, p.a, p.b, p.c, true, layer.bias);
  }
  void linear_part(const Linear<T>& map, const T* x, float* part, std::size_t rows) override {
    const Product p = forward_product(map, x, part, map.out, rows);
    multiply(p.extents, p.a, p.b, p.c, false);
    elementwise_->add_bias(map.bias, part, rows, map.out);
  }
  void multiply(const Extents& extents, const Matrix& a, const Matrix& b, const Matrix& c,
                bool add_to_c) override {
    products_.multiply(extents, a, b, c, add_to_c);
  }

 private:
  std::shared_ptr<ElementwiseOps<T>> elementwise_;
  Products products_;
};

/// Sums squares in sixteen interleaved sums, so that every instruction set gives the same bits.
template <class T>
float square_sum(const T* values, std::size_t size) {
  constexpr std::size_t kSums = 16;
  std::array<float, kSums> sums = {};
  std::size_t at = 0;
  for (; at + kSums <= size; at += kSums) {
    for (std::size_t i = 0; i < kSums; ++i) {
      const float value = to_float(values[at + i]);
      sums[i] += value * value;
    }
  }
  for (std::size_t i = 0; at + i < size; ++i) {
    const float value = to_float(values[at + i]);
    sums[i] += value * value;
  }
  for (std::size_t half = kSums / 2; half > 0; half /= 2) {
    for (std::size_t i = 0; i < half; ++i) sums[i] += sums[half + i];
  }
  return sums[0];
}

template <class T>
class HostAdapters final : public AdapterOps<T> {
 public:
  void compute_dora_scales(const AdaptedRows<T>& rows, float* scales,
                           float* inverse_norms) override {
    const std::size_t out = rows.map.out;
    split(KernelGroup::elementwise, out, kStep, [&](Range r) {
      if (rows.map.flipped) {
        for (std::size_t i = r.begin; i < r.end; ++i) {
          scales[i] = square_sum(rows.map.weight + i * rows.map.in, rows.map.in);
        }
      } else {
        std::fill(scales + r.begin, scales + r.end, 0.0F);
        for (std::size_t row = 0; row < rows.map.in; ++row) {
          const T* const from = rows.map.weight + row * out;
          for (std::size_t i = r.begin; i < r.end; ++i) {
            const float value = to_float(from[i]);
            scales[i] += value * value;
          }
        }
      }
      for (std::size_t i = r.begin; i < r.end; ++i) {
        const T* const b = rows.b + i * rows.rank;
        const float added =
            added_square([b](std::size_t k) { return to_float(b[k]); }, rows.cross + i * rows.rank,
                         rows.gram, rows.rank, rows.scale);
        const float norm = std::sqrt(std::max(scales[i] + added, 0.0F));
        inverse_norms[i] = norm > 0.0F ? 1.0F / norm : 0.0F;
        scales[i] = to_float(rows.magnitudes[i]) * inverse_norms[i];
      }
    });
  }
  void scale_columns(const ScaledColumns<T>& c) override {
    split(KernelGroup::elementwise, c.rows, 1, [&](Range r) {
      for (std::size_t row = r.begin; row < r.end; ++row) {
        const T* const x = c.x + row * c.x_step;
        T* const y = c.y + row * c.y_step;
        for (std::size_t i = 0; i < c.width; ++i) {
          float value = to_float(x[i]) * (c.scales == nullptr ? c.factor : c.scales[i]);
          if (c.bias != nullptr) value += to_float(c.bias[i]);
          if (c.residual != nullptr) value += to_float(c.residual[row * c.y_step + i]);
          y[i] = from_float<T>(value);
        }
      }
    });
  }
  void add_column_products(const ColumnProducts<T>& c, float* gradient) override {
    split(KernelGroup::elementwise, c.width, kStep, [&](Range r) {
      for (std::size_t first = r.begin; first < r.end; first += kStep) {
        const std::size_t count = std::min(kStep, r.end - first);
        std::array<float, kStep> sums = {};
        for (std::size_t row = 0; row < c.rows; ++row) {
          const T* const x = c.x + row * c.x_step + first;
          const T* const y = c.y + row * c.y_step + first;
          for (std::size_t i = 0; i < count; ++i) sums[i] += to_float(x[i]) * to_float(y[i]);
        }
        for (std::size_t i = 0; i < count; ++i)
          gradient[first + i] += c.factors[first + i] * sums[i];
      }
    });
  }
};

}  // namespace

template <class T>
void add_product_ops(const State<T>& /*state*/, DeviceOps<T>& to) {
  to.products = std::make_shared<HostProducts<T>>(to.elementwise);
  to.adapters = std::make_shared<HostAdapters<T>>();
}

template void add_product_ops(const State<float>&, DeviceOps<float>&);
template void add_product_ops(const State<Bf16>&, DeviceOps<Bf16>&);
template void add_product_ops(const State<F16>&, DeviceOps<F16>&);

}  // namespace ballast::model::host
