#include <cstddef>
#include <memory>
#include <optional>
#include <utility>

#include "src/model/cuda/ops.h"
#include "src/model/cuda/products/products.h"
#include "src/model/cuda/rows/rows.h"

namespace ballast::model::cuda {
namespace {

template <class T>
class CudaProducts final : public ProductOps<T>, OnStream {
 public:
  CudaProducts(const State& state, std::shared_ptr<ElementwiseOps<T>> elementwise)
      : OnStream(state), elementwise_(std::move(elementwise)) {}

  void linear(const Linear<T>& layer, const T* x, T* y, std::size_t y_row,
              std::size_t rows) override {
    const Product p = forward_product(layer, x, y, y_row, rows);
    multiply_with(p.extents, p.a, p.b, p.c, {.bias = layer.bias});
  }
  void linear_onto(const Linear<T>& layer, const T* x, const T* residual, T* y,
                   std::size_t rows) override {
    const Product p = forward_product(layer, x, y, layer.out, rows);
    multiply_with(p.extents, p.a, p.b, p.c, {.addend = residual, .bias = layer.bias});
  }
  void multiply(const Extents& extents, const Matrix& a, const Matrix& b, const Matrix& c,
                bool add_to_c) override {
    in_whole_eights(extents, a, b, c, add_to_c,
                    [&](const Extents& part, const Matrix& left, const Matrix& right,
                        const Matrix& to, bool adds) {
                      multiply_with(part, left, right, to, {.addend = adds ? to.data : nullptr});
                    });
  }
  void linear_part(const Linear<T>& map, const T* x, float* part, std::size_t rows) override {
    const Product p = forward_product(map, x, part, map.out, rows);
    multiply(p.extents, p.a, p.b, p.c, false);
    elementwise_->add_bias(map.bias, part, rows, map.out);
  }

 private:
  void multiply_with(const Extents& extents, const Matrix& a, const Matrix& b, const Matrix& c,
                     const Extras& extras) {
    if (!products_) products_.emplace(state_->options.products, state_->options.set);
    products_->set_workspace(state_->products_workspace);
    products_->multiply(queue(), extents, a, b, c, extras);
    check(cudaSuccess, "matrix product", {extents.m, extents.n, extents.k});
  }
  std::shared_ptr<ElementwiseOps<T>> elementwise_;
  std::optional<Products> products_;
};

template <class T>
class CudaAdapters final : public AdapterOps<T>, OnStream {
 public:
  explicit CudaAdapters(const State& state) : OnStream(state) {}

  void compute_dora_scales(const AdaptedRows<T>& rows, float* scales,
                           float* inverse_norms) override {
    check(cuda::compute_dora_scales(queue(), rows, scales, inverse_norms),
          "norms of an adapted map", {rows.map.out, rows.rank});
  }
  void scale_columns(const ScaledColumns<T>& columns) override {
    check(cuda::scale_columns(queue(), columns), "scales of an adapted map",
          {columns.rows, columns.width});
  }
  void add_column_products(const ColumnProducts<T>& columns, float* gradient) override {
    check(cuda::add_column_products(queue(), columns, gradient, state_->partials),
          "gradients of magnitudes", {columns.rows, columns.width});
  }
};

}  // namespace

template <class T>
void add_product_ops(const State& state, DeviceOps<T>& to) {
  to.products = std::make_shared<CudaProducts<T>>(state, to.elementwise);
  to.adapters = std::make_shared<CudaAdapters<T>>(state);
}

template void add_product_ops(const State&, DeviceOps<float>&);
template void add_product_ops(const State&, DeviceOps<Bf16>&);
template void add_product_ops(const State&, DeviceOps<F16>&);

}  // namespace ballast::model::cuda
