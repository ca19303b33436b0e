#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "ballast/core/clocks.h"
#include "ballast/core/dtype.h"
#include "ballast/core/memory.h"

#include "src/model/description/rotary_angles.h"
#include "src/model/host/attention.h"
#include "src/model/host/delta_rule.h"
#include "src/model/host/ops.h"
#include "src/model/host/team.h"

namespace ballast::model::host {

namespace {

/// HeadOps::fill_angles() for rows [begin, end) of the table. `length`: tokens of a whole sequence.
void fill_angle_rows(const Rotary& rotary, const Angles& angles, const std::int32_t* positions,
                     std::size_t length, std::size_t begin, std::size_t end) {
  std::size_t document = 0;
  std::vector<double> frequencies = rotary.frequencies;
  for (std::size_t row = begin; row < end; ++row) {
    if (angles.by_row) {
      const std::size_t tokens = document_length(positions, row, length);
      if (tokens != document) frequencies = frequencies_in_document(rotary, tokens);
      document = tokens;
    }
    const bool given = angles.by_row && positions != nullptr;
    const auto position =
        static_cast<double>(given ? static_cast<std::size_t>(positions[row]) : row % length);
    const double factor = factor_at(position, rotary.factor, rotary.slope, rotary.period);
    for (std::size_t i = 0; i < angles.half; ++i) {
      const double angle = position * frequencies[i];
      angles.cosine[row * angles.half + i] = static_cast<float>(std::cos(angle) * factor);
      angles.sine[row * angles.half + i] = static_cast<float>(std::sin(angle) * factor);
    }
  }
}

// HeadOps::copy_groups() and sum_groups() for rows [begin, end).

template <class T>
void copy_groups_of_rows(const Groups& groups, const T* from, const GroupSteps& from_steps, T* to,
                         const GroupSteps& to_steps, std::size_t zeros, std::size_t begin,
                         std::size_t end) {
  for (std::size_t row = begin; row < end; ++row) {
    for (std::size_t group = 0; group < groups.count; ++group) {
      T* const at = to + row * to_steps.row + group * to_steps.group;
      std::copy_n(from + row * from_steps.row + group * from_steps.group, groups.width, at);
      std::fill_n(at + groups.width, zeros, T{});
    }
  }
}

template <class T>
void sum_groups_of_rows(const Groups& groups, const T* from, const GroupSteps& steps, T* to,
                        std::size_t to_row, std::size_t begin, std::size_t end) {
  for (std::size_t row = begin; row < end; ++row) {
    for (std::size_t column = 0; column < groups.width; ++column) {
      float sum = 0.0F;
      for (std::size_t group = 0; group < groups.count; ++group) {
        sum += to_float(from[row * steps.row + group * steps.group + column]);
      }
      to[row * to_row + column] = from_float<T>(sum);
    }
  }
}

/// Number of parts of a sum over rows.
constexpr std::size_t kParts = 32;
/// Channels per thread: multiples of a cache line of any type.
constexpr std::size_t kChannels = 32;

template <class T>
class HostHeads final : public HeadOps<T> {
 public:
  explicit HostHeads(State<T> state) : state_(std::move(state)) {}

  void fill_angles(const Rotary& rotary, const Angles& angles,
                   const std::int32_t* positions) override {
    const std::size_t length = state_->extents.shape.whole_length();
    split(KernelGroup::rotary, angles.by_row ? state_->extents.shape.tokens() : length, 1,
          [&](Range r) { fill_angle_rows(rotary, angles, positions, length, r.begin, r.end); });
  }
  void rotate(T* x, std::size_t heads, const Angles& angles, const std::int32_t* positions,
              float direction) override {
    if (angles.by_row) positions = nullptr;
    const AttentionShape& shape = state_->heads();
    const std::size_t length =
        angles.by_row ? state_->extents.shape.tokens() : state_->extents.shape.whole_length();
    const auto rotate =
        angles.interleaved ? state_->kernels.rows.interleaved_rope : state_->kernels.rows.rope;
    split(KernelGroup::rotary, state_->extents.shape.tokens(), 1, [&](Range r) {
      rotate(x + r.begin * shape.row(), shape.row(), r.begin, r.size(), length, positions, heads,
             shape.head_dim, angles.half, angles.cosine, angles.sine, direction);
    });
  }
  void copy_groups(const Groups& g, const T* from, const GroupSteps& in, T* to,
                   const GroupSteps& out, std::size_t zeros) override {
    split(KernelGroup::elementwise, g.rows, 1,
          [&](Range r) { copy_groups_of_rows(g, from, in, to, out, zeros, r.begin, r.end); });
  }
  void sum_groups(const Groups& g, const T* from, const GroupSteps& steps, T* to,
                  std::size_t to_row) override {
    split(KernelGroup::elementwise, g.rows, 1,
          [&](Range r) { sum_groups_of_rows(g, from, steps, to, to_row, r.begin, r.end); });
  }
  void regroup(const Regrouping& how, const T* from, T* to) override {
    split(KernelGroup::elementwise, how.rows(), 1, [&](Range rows) {
      for (std::size_t row = rows.begin; row < rows.end; ++row) {
        for (const std::size_t begin : {std::size_t{0}, how.first, how.first + how.others}) {
          const std::size_t wide = begin == 0 ? how.first : how.others;
          if (wide == 0) continue;
          std::memcpy(to + how.at(how.to, row, begin), from + how.at(how.from, row, begin),
                      wide * sizeof(T));
        }
      }
    });
  }

 private:
  State<T> state_;
};

template <class T>
class HostAttention final : public AttentionOps<T> {
 public:
  explicit HostAttention(State<T> state)
      : state_(std::move(state)),
        by_shape_(make_attentions(state_->extents.heads, state_->kernels.rows, state_->threads)) {}

  void use_heads(std::size_t number) override { state_->selected = number; }
  [[nodiscard]] std::size_t attention_scratch_bytes() const override {
    std::size_t most = 0;
    for (const Attention<T>& one : by_shape_) most = std::max(most, one.scratch_bytes());
    return most;
  }
  void attention(const AttentionMask& mask, const AttentionSinks<T>& sinks, const T* qkv, T* out,
                 float* log_sums, std::byte* scratch) override {
    const KernelClock clock(KernelGroup::attention);
    by_shape_[state_->selected].forward(mask, sinks, qkv, out, log_sums, scratch);
  }
  void attention_backward(const AttentionMask& mask, const AttentionSinks<T>& sinks, const T* qkv,
                          const T* out, const float* log_sums, const T* dout, T* dqkv,
                          std::byte* scratch) override {
    const KernelClock clock(KernelGroup::attention);
    by_shape_[state_->selected].backward(mask, sinks, qkv, out, log_sums, dout, dqkv, scratch);
  }

 private:
  State<T> state_;
  std::deque<Attention<T>> by_shape_;
};

template <class T>
class HostMixers final : public MixerOps<T> {
 public:
  explicit HostMixers(const SharedState<T>& state)
      : shape_(state.extents.delta),
        kernels_(state.kernels.mixers),
        epsilon_(state.extents.epsilon),
        rule_(shape_, state.kernels, state.threads) {}

  [[nodiscard]] std::size_t scratch_bytes() const override {
    Bump counting;
    take_scratch(counting);
    return std::max<std::size_t>(counting.used(), rule_.scratch_bytes());
  }
  void convolve(const Convolution<T>& how, const T* x, T* y, std::byte* scratch) override {
    const KernelClock clock(KernelGroup::delta_rule);
    const Taps s = taps_of(how, scratch);
    const std::size_t step = how.shape.x_step;
    split(how.shape.tokens(), 1, [&](Range r) {
      kernels_.convolve(rows_of(how, r.begin, r.end), x, step, s.weights, y, how.shape.channels);
    });
  }
  void convolve_backward(const Convolution<T>& how, const T* x, T* dy,
                         std::byte* scratch) override {
    const KernelClock clock(KernelGroup::delta_rule);
    const Taps s = taps_of(how, scratch);
    const std::size_t step = how.shape.x_step;
    by_channels(how, s, [&](const ConvolvedRows& rows, Range here) {
      kernels_.convolve_backward(rows, x + here.begin, step, s.weights + here.begin,
                                 dy + here.begin, step, s.sums + here.begin, how.shape.channels,
                                 here.size());
    });
  }
  [[nodiscard]] std::size_t convolution_scratch_bytes(
      const ConvolutionShape& shape) const override {
    Bump counting;
    take_taps(counting, shape);
    return counting.used();
  }
  void gated_convolve(const Convolution<T>& how, const T* x, T* y, std::byte* scratch) override {
    const KernelClock clock(KernelGroup::delta_rule);
    const Taps s = taps_of(how, scratch);
    split(how.shape.tokens(), 1, [&](Range r) {
      kernels_.gated_convolve(rows_of(how, r.begin, r.end), x, how.shape.x_step, s.weights, y,
                              how.shape.channels);
    });
  }
  void gated_convolve_backward(const Convolution<T>& how, const T* x, const T* dy, T* dx,
                               std::byte* scratch) override {
    const KernelClock clock(KernelGroup::delta_rule);
    const Taps s = taps_of(how, scratch);
    by_channels(how, s, [&](const ConvolvedRows& rows, Range here) {
      kernels_.gated_convolve_backward(rows, x + here.begin, how.shape.x_step,
                                       s.weights + here.begin, dy + here.begin, dx + here.begin,
                                       s.sums + here.begin, how.shape.channels, here.size());
    });
  }
  void gated_norm(const Norm<T>& weights, const T* x, const T* gate, T* y) override {
    const KernelClock clock(KernelGroup::delta_rule);
    const std::size_t wide = shape_.values();
    split(shape_.tokens(), 1, [&](Range r) {
      for (std::size_t row = r.begin; row < r.end; ++row) {
        kernels_.gated_norm(x + row * wide, gate + row * shape_.row(), weights.weight,
                            weights.epsilon_or(epsilon_), y + row * wide, shape_.value_heads,
                            shape_.value_width);
      }
    });
  }
  void gated_norm_backward(const Norm<T>& weights, const T* x, const T* gate, T* dy, T* dgate,
                           std::byte* scratch) override {
    const KernelClock clock(KernelGroup::delta_rule);
    float* const sums = scratch_of(scratch).sums;
    const std::size_t wide = shape_.values();
    const std::size_t width = shape_.value_width;
    const std::size_t parts = std::min(shape_.tokens(), kParts);
    split(parts, 1, [&](Range own) {
      for (std::size_t part = own.begin; part < own.end; ++part) {
        std::fill_n(sums + part * width, width, 0.0F);
        const Range rows = range_of(shape_.tokens(), parts, part);
        for (std::size_t row = rows.begin; row < rows.end; ++row) {
          const std::size_t step = row * shape_.row();
          kernels_.gated_norm_backward(x + row * wide, gate + step, weights.weight,
                                       weights.epsilon_or(epsilon_), dy + row * wide, dgate + step,
                                       sums + part * width, shape_.value_heads, width);
        }
      }
    });
    for (std::size_t part = 0; part < parts && weights.weight_gradient != nullptr; ++part) {
      for (std::size_t i = 0; i < width; ++i) {
        weights.weight_gradient[i] += sums[part * width + i];
      }
    }
  }
  void output_gate(const T* x, const T* gate, std::size_t gate_step, T* y, std::size_t rows,
                   std::size_t width) override {
    const KernelClock clock(KernelGroup::activation);
    split(rows, 1, [&](Range r) {
      for (std::size_t row = r.begin; row < r.end; ++row) {
        kernels_.sigmoid_gate(x + row * width, gate + row * gate_step, y + row * width, width);
      }
    });
  }
  void output_gate_backward(const T* x, T* gate, std::size_t gate_step, T* dy, std::size_t rows,
                            std::size_t width) override {
    const KernelClock clock(KernelGroup::activation);
    split(rows, 1, [&](Range r) {
      for (std::size_t row = r.begin; row < r.end; ++row) {
        kernels_.sigmoid_gate_backward(x + row * width, gate + row * gate_step, dy + row * width,
                                       width);
      }
    });
  }
  void recur(const DeltaInputs<T>& in, T* out, float* states, std::byte* scratch) override {
    const KernelClock clock(KernelGroup::delta_rule);
    rule_.forward(in, out, states, scratch);
  }
  void recur_backward(const DeltaInputs<T>& in, const float* states, const T* dout,
                      const DeltaGradients<T>& to, std::byte* scratch) override {
    const KernelClock clock(KernelGroup::delta_rule);
    rule_.backward(in, states, dout, to, scratch);
  }

 private:
  struct Scratch {
    float* weights;  ///< see Taps
    float* sums;     ///< see Taps, or [parts, value_width]
  };
  Scratch take_scratch(Bump& bump) const {
    const std::size_t taps = shape_.taps * shape_.channels();
    return {bump.take<float>(taps), bump.take<float>(std::max(taps, kParts * shape_.value_width))};
  }
  [[nodiscard]] Scratch scratch_of(std::byte* scratch) const {
    Bump bump(scratch);
    return take_scratch(bump);
  }
  /// Parameters of a convolution [parameters of a channel, channels], and sums of their gradients.
  struct Taps {
    float* weights;
    float* sums;
  };
  static Taps take_taps(Bump& bump, const ConvolutionShape& shape) {
    const std::size_t size = shape.parameters() * shape.channels;
    return {bump.take<float>(size), bump.take<float>(size)};
  }
  static Taps taps_of(const Convolution<T>& how, std::byte* scratch) {
    Bump bump(scratch);
    const Taps s = take_taps(bump, how.shape);
    const std::size_t channels = how.shape.channels;
    const std::size_t taps = how.shape.taps;
    split(channels, kChannels, [&](Range here) {
      for (std::size_t c = here.begin; c < here.end; ++c) {
        for (std::size_t tap = 0; tap < taps; ++tap) {
          s.weights[tap * channels + c] = to_float(how.weight[c * taps + tap]);
        }
        if (how.shape.biased) s.weights[taps * channels + c] = to_float(how.bias[c]);
      }
    });
    return s;
  }
  /// Calls add(rows of a sequence, channels) and adds the sums to the gradients.
  template <class Add>
  static void by_channels(const Convolution<T>& how, const Taps& s, const Add& add) {
    const ConvolutionShape& shape = how.shape;
    std::fill_n(s.sums, shape.parameters() * shape.channels, 0.0F);
    split(shape.channels, kChannels, [&](Range here) {
      for (std::size_t sequence = 0; sequence < shape.sequences; ++sequence) {
        const std::size_t first = sequence * shape.length;
        add(rows_of(how, first, first + shape.length), here);
      }
      for (std::size_t c = here.begin; c < here.end; ++c) {
        for (std::size_t tap = 0; tap < shape.taps && how.weight_gradient != nullptr; ++tap) {
          how.weight_gradient[c * shape.taps + tap] += s.sums[tap * shape.channels + c];
        }
        if (shape.biased && how.bias_gradient != nullptr)
          how.bias_gradient[c] += s.sums[shape.taps * shape.channels + c];
      }
    });
  }
  static ConvolvedRows rows_of(const Convolution<T>& how, std::size_t begin, std::size_t end) {
    return {begin, end, how.positions, how.shape.length, how.shape.taps, how.shape.biased};
  }
  DeltaShape shape_;
  const MixerKernels<T>& kernels_;
  float epsilon_;
  DeltaRule<T> rule_;
};

template <class T>
class HostLinks final : public LinkOps<T> {
 public:
  explicit HostLinks(const RowKernels<T>& kernels) : kernels_(kernels) {}

  void sum_columns(const T* x, std::size_t step, std::size_t rows, std::size_t width, bool adds,
                   float* sums) override {
    split(KernelGroup::elementwise, rows, 1, [&](Range r) {
      for (std::size_t row = r.begin; row < r.end; ++row) {
        float* const to = sums + row * width;
        if (adds) {
          kernels_.accumulate(to, x + row * step, width);
        } else {
          kernels_.widen(x + row * step, to, width);
        }
      }
    });
  }
  void add_sums(const float* sums, std::size_t rows, std::size_t width, T* x,
                std::size_t step) override {
    split(KernelGroup::elementwise, rows, 1, [&](Range r) {
      for (std::size_t row = r.begin; row < r.end; ++row) {
        T* const to = x + row * step;
        for (std::size_t i = 0; i < width; ++i) {
          to[i] = from_float<T>(to_float(to[i]) + sums[row * width + i]);
        }
      }
    });
  }
  void mix_rows(const TokenRows<const T>& rows, const TokenMix& how, const T* x, std::size_t step,
                T* y) override {
    split(KernelGroup::elementwise, rows.size, 1, [&](Range r) {
      for (std::size_t row = r.begin; row < r.end; ++row) {
        const T* const a = x + row * step;
        const T* const b = rows.rows + row * rows.width;
        T* const to = y + row * rows.width;
        for (std::size_t i = 0; i < rows.width; ++i) {
          // The product is rounded before it is added, on every instruction set.
          const float scaled = to_float(from_float<T>(to_float(b[i]) * how.scale));
          to[i] = from_float<T>((to_float(a[i]) + scaled) * how.factor);
        }
      }
    });
  }
  void mix_rows_backward(const TokenRows<const T>& dy, const TokenMix& how, float* of_rows, T* dx,
                         std::size_t step) override {
    split(KernelGroup::elementwise, dy.size, 1, [&](Range r) {
      for (std::size_t row = r.begin; row < r.end; ++row) {
        const T* const from = dy.rows + row * dy.width;
        if (of_rows != nullptr) {
          float* const to = of_rows + row * dy.width;
          std::fill_n(to, dy.width, 0.0F);
          kernels_.accumulate_scaled(to, from, how.factor * how.scale, dy.width);
        }
        if (dx != nullptr) kernels_.scale(from, how.factor, dx + row * step, dy.width);
      }
    });
  }

 private:
  const RowKernels<T>& kernels_;
};

}  // namespace

template <class T>
void add_attention_ops(const State<T>& state, DeviceOps<T>& to) {
  to.heads = std::make_shared<HostHeads<T>>(state);
  to.attention = std::make_shared<HostAttention<T>>(state);
  to.mixers = std::make_shared<HostMixers<T>>(*state);
  to.links = std::make_shared<HostLinks<T>>(state->kernels.rows);
}

template void add_attention_ops(const State<float>&, DeviceOps<float>&);
template void add_attention_ops(const State<Bf16>&, DeviceOps<Bf16>&);
template void add_attention_ops(const State<F16>&, DeviceOps<F16>&);

}  // namespace ballast::model::host
