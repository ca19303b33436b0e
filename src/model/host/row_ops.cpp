#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <numeric>
#include <span>

#include "ballast/core/clocks.h"
#include "ballast/core/error.h"
#include "ballast/core/units.h"

#include "src/model/host/kernel_tables.h"
#include "src/model/host/ops.h"
#include "src/model/host/team.h"

namespace ballast::model::host {
namespace {

/// Calls `piece(first, place, size)` for each part of `range` within one row of `matrix`. `place`:
/// address of the part's first element.
void by_rows(Range range, const auto& matrix, const auto& piece) {
  for (std::size_t at = range.begin; at < range.end;) {
    const std::size_t row = at / matrix.width;
    const std::size_t end = std::min(range.end, (row + 1) * matrix.width);
    piece(at, row * matrix.step + at % matrix.width, end - at);
    at = end;
  }
}

template <class T>
bool is_centred(const Norm<T>& weights) {
  return weights.centred || weights.bias != nullptr;
}

template <class T>
class HostRows final : public NormOps<T>, public ElementwiseOps<T> {
 public:
  explicit HostRows(State<T> state) : state_(std::move(state)), kernels_(state_->kernels.rows) {}

  void norm(const Norm<T>& weights, const T* x, T* y, std::size_t rows,
            const T* residual) override {
    split(KernelGroup::norm, rows, 1, [&](Range r) {
      const std::size_t at = r.begin * state_->extents.hidden;
      kernels_.norm(x + at, weights.weight, weights.bias, weights.offset,
                    weights.epsilon_or(state_->extents.epsilon),
                    residual == nullptr ? nullptr : residual + at, y + at, r.size(),
                    state_->extents.hidden, weights.centred);
    });
  }
  void norm_backward(const Norm<T>& weights, const T* x, const T* dy, const T* residual, T* dx,
                     std::size_t rows) override {
    const KernelClock clock(KernelGroup::norm);
    const bool centred = is_centred(weights);
    sum_parts(rows, state_->extents.hidden, [&](Range r, float* of_weight, float* of_bias) {
      const std::size_t at = r.begin * state_->extents.hidden;
      kernels_.norm_backward(x + at, weights.weight, dy + at, weights.offset,
                             weights.epsilon_or(state_->extents.epsilon),
                             residual == nullptr ? nullptr : residual + at, dx + at, of_weight,
                             centred ? of_bias : nullptr, r.size(), state_->extents.hidden);
    });
    add_sums(rows, 0, weights.weight_gradient, state_->extents.hidden);
    if (weights.bias != nullptr) add_sums(rows, 1, weights.bias_gradient, state_->extents.hidden);
  }
  void norm_groups(const Norm<T>& w, const Groups& groups, const T* x, std::size_t x_step, T* y,
                   std::size_t y_step) override {
    split(KernelGroup::norm, groups.rows, 1, [&](Range r) {
      for (std::size_t row = r.begin; row < r.end; ++row) {
        kernels_.norm(x + row * x_step, w.weight, nullptr, w.offset,
                      w.epsilon_or(state_->extents.epsilon), nullptr, y + row * y_step,
                      groups.count, groups.width, false);
      }
    });
  }
  void norm_groups_backward(const Norm<T>& w, const Groups& groups, const T* x, std::size_t x_step,
                            T* dy, std::size_t dy_step) override {
    const KernelClock clock(KernelGroup::norm);
    sum_parts(groups.rows, groups.width, [&](Range r, float* of_weight, float*) {
      for (std::size_t row = r.begin; row < r.end; ++row) {
        T* const d = dy + row * dy_step;
        kernels_.norm_backward(x + row * x_step, w.weight, d, w.offset,
                               w.epsilon_or(state_->extents.epsilon), nullptr, d, of_weight,
                               nullptr, groups.count, groups.width);
      }
    });
    add_sums(groups.rows, 0, w.weight_gradient, groups.width);
  }
  void activate(Activation f, const T* x, T* y, std::size_t size) override {
    const auto kernel = kernels_of(f).activate;
    split(KernelGroup::activation, size, kStep,
          [&](Range r) { kernel(x + r.begin, y + r.begin, r.size()); });
  }
  void activate_backward(Activation f, const T* x, T* d, float* bias_gradient, std::size_t rows,
                         std::size_t width) override {
    const KernelClock clock(KernelGroup::activation);
    const auto kernel = kernels_of(f).activate_backward;
    sum_parts(rows, width, [&](Range r, float* of_bias, float*) {
      kernel(x + r.begin * width, d + r.begin * width, of_bias, r.size(), width);
    });
    add_sums(rows, 0, bias_gradient, width);
  }
  void glu(const Gating& how, const GateUp<T>& in, T* y) override {
    const auto kernel = kernels_of(how.activation).glu;
    split(KernelGroup::activation, in.rows * in.width, kStep, [&](Range r) {
      by_rows(r, in, [&](std::size_t at, std::size_t from, std::size_t size) {
        if (how.limit > 0.0F) {
          kernels_.limited_swiglu(in.gate + from, in.up + from, y + at, size, how.limit, how.slope);
        } else {
          kernel(in.gate + from, in.up + from, y + at, size);
        }
      });
    });
  }
  void glu_backward(const Gating& how, const GateUp<T>& in, const T* dy) override {
    const auto kernel = kernels_of(how.activation).glu_backward;
    split(KernelGroup::activation, in.rows * in.width, kStep, [&](Range r) {
      by_rows(r, in, [&](std::size_t at, std::size_t from, std::size_t size) {
        if (how.limit > 0.0F) {
          kernels_.limited_swiglu_backward(in.gate + from, in.up + from, dy + at, size, how.limit,
                                           how.slope);
        } else {
          kernel(in.gate + from, in.up + from, dy + at, size);
        }
      });
    });
  }
  void add_column_sums(const T* x, std::size_t step, float* gradient, std::size_t rows,
                       std::size_t width) override {
    const KernelClock clock(KernelGroup::elementwise);
    sum_parts(rows, width, [&](Range r, float* sums, float*) {
      kernels_.column_sum(x + r.begin * step, step, sums, r.size(), width);
    });
    add_sums(rows, 0, gradient, width);
  }
  void add_bias(const T* bias, float* y, std::size_t rows, std::size_t width) override {
    if (bias == nullptr) return;
    split(KernelGroup::elementwise, rows, 1, [&](Range r) {
      for (std::size_t i = r.begin; i < r.end; ++i) {
        kernels_.accumulate(y + i * width, bias, width);
      }
    });
  }
  void scale(T* x, float factor, std::size_t size) override {
    split(KernelGroup::elementwise, size, kStep,
          [&](Range r) { kernels_.scale(x + r.begin, factor, x + r.begin, r.size()); });
  }
  void scale_by(const T* addends, std::size_t count, T* x, std::size_t size) override {
    float factor = 0.0F;
    for (std::size_t i = 0; i < count; ++i) factor += to_float(addends[i]);
    scale(x, factor, size);
  }
  void drop(const DropoutMask& mask, const T* x, T* y, std::size_t size, bool add_to_y) override {
    split(KernelGroup::elementwise, size, kStep, [&](Range r) {
      for (std::size_t at = r.begin; at < r.end; at += 4) {
        const auto factors = mask.factors(at / 4);
        for (std::size_t i = 0; i < std::min<std::size_t>(4, r.end - at); ++i) {
          const float before = add_to_y ? to_float(y[at + i]) : 0.0F;
          y[at + i] = from_float<T>(before + to_float(x[at + i]) * factors[i]);
        }
      }
    });
  }
  void zero(float* values, std::size_t size) override {
    split(KernelGroup::elementwise, size, kPage / sizeof(float),
          [&](Range r) { std::memset(values + r.begin, 0, r.size() * sizeof(float)); });
  }
  void widen(const T* x, float* y, std::size_t size) override {
    split(KernelGroup::elementwise, size, kPage / sizeof(float),
          [&](Range r) { kernels_.widen(x + r.begin, y + r.begin, r.size()); });
  }
  void accumulate(const float* part, float* sums, std::size_t size) override {
    split(KernelGroup::elementwise, size, kPage / sizeof(float),
          [&](Range r) { sum_kernels_.accumulate(sums + r.begin, part + r.begin, r.size()); });
  }
  void put(std::span<const float> values, float* to) override {
    std::copy(values.begin(), values.end(), to);
  }
  void add_sum(const float* values, std::size_t count, float* sum) override {
    *sum = static_cast<float>(std::accumulate(values, values + count, static_cast<double>(*sum)));
  }
  void copy_bytes(const std::byte* from, std::byte* to, std::size_t size) override {
    split(size, kPage,
          [&](Range here) { std::memcpy(to + here.begin, from + here.begin, here.size()); });
  }

 private:
  [[nodiscard]] const auto& kernels_of(Activation f) const {
    return kernels_.activations.at(static_cast<std::size_t>(f));
  }
  /// Calls add(range of rows, first sums, second sums) for each part. The sums [width] are zeroed
  /// before.
  template <class Add>
  void sum_parts(std::size_t rows, std::size_t width, const Add& add) const {
    const std::size_t parts = state_->parts_of(rows);
    split(parts, 1, [&](Range own) {
      for (std::size_t part = own.begin; part < own.end; ++part) {
        std::memset(state_->sum(part, 0), 0, width * sizeof(float));
        std::memset(state_->sum(part, 1), 0, width * sizeof(float));
        add(range_of(rows, parts, part), state_->sum(part, 0), state_->sum(part, 1));
      }
    });
  }
  /// gradient [width] (null: nothing) += the sums of the parts, in order.
  void add_sums(std::size_t rows, std::size_t which, float* gradient, std::size_t width) const {
    if (gradient == nullptr) return;
    const std::size_t parts = state_->parts_of(rows);
    split(width, kStep, [&](Range columns) {
      for (std::size_t part = 0; part < parts; ++part) {
        const float* const from = state_->sum(part, which);
        for (std::size_t i = columns.begin; i < columns.end; ++i) gradient[i] += from[i];
      }
    });
  }
  State<T> state_;
  const RowKernels<T>& kernels_;
  const RowKernels<float>& sum_kernels_ = best_kernels<float>().rows;
};

}  // namespace

template <class T>
void add_row_ops(const State<T>& state, DeviceOps<T>& to) {
  const auto rows = std::make_shared<HostRows<T>>(state);
  to.norms = rows;
  to.elementwise = rows;
}

template void add_row_ops(const State<float>&, DeviceOps<float>&);
template void add_row_ops(const State<Bf16>&, DeviceOps<Bf16>&);
template void add_row_ops(const State<F16>&, DeviceOps<F16>&);

}  // namespace ballast::model::host
