#pragma once

#include <algorithm>
#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ballast/core/memory.h"
#include "ballast/model/compute.h"

#include "src/model/compute/adapted_maps.h"
#include "src/model/compute/formulas.h"
#include "src/model/compute/layer_arguments.h"
#include "src/model/compute/routing.h"
#include "src/model/description/layer_rules.h"

namespace ballast::model {

struct ExpertsSpec;

/// Routers and experts of a model. A router reads the result of its norm and chooses experts for
/// each row. Each expert then computes its rows and adds them, weighted, to the sums of the half,
/// in the order of the experts. Rows are not padded to the fullest expert: the rows of one expert
/// are copied next to each other, a chunk at a time.
template <class T>
class Experts {
 public:
  Experts(const Architecture& model, std::size_t tokens, DeviceOps<T>& ops);

  [[nodiscard]] bool empty() const { return routers_.empty(); }
  [[nodiscard]] std::size_t experts() const { return shape_.experts; }

  /// Bytes of Port::normed for a micro-batch: the norm's result and the routing.
  [[nodiscard]] std::size_t rows_bytes() const;

  void take_memory(Bump& bump);

  /// Routes the rows whose norm is at the start of `rows`. `targets`: see RouterOps::route().
  /// `moved`: PassArguments::correction_biases. `starts` [experts + 1], `totals` and `losses` [2]
  /// are null if not wanted. The first router resets the totals; the last one computes the losses
  /// from them.
  void route(std::size_t block, const BlockWeights<T>& weights, std::span<const float> moved,
             const std::int32_t* targets, std::byte* rows, std::int32_t* starts, double* totals,
             double* losses);

  /// Computes the terms of a micro-batch with the given `totals` in the router losses of a step.
  /// `choices` [experts]: those of the whole step, which replace the choices in the totals.
  void losses_of_step(const std::vector<double>& choices, double* totals, double* losses) {
    const RouterTotals sums = RouterTotals::at(totals, shape_.experts);
    ops_.routers->put_choices(choices, sums);
    ops_.routers->router_losses(shape_, sums, losses);
  }

  /// Adds an expert's results for its choices [first, first + count) to `sums` [N, H].
  void forward(std::size_t block, const BlockWeights<T>& weights, std::byte* rows,
               std::size_t first, std::size_t count, float* sums) {
    const Rows at = rows_at(rows);
    add_results(block, weights, at, at.routing, {shape_.per_token, first, count}, sums);
  }

  /// Backward pass of an expert, given `dy` [N, H]: adds the gradients of its weights, writes those
  /// of the weights of its choices, and adds the gradient of the norm's result to `sums`.
  void backward(std::size_t block, const BlockWeights<T>& weights, std::byte* rows,
                std::size_t first, std::size_t count, const T* dy, float* sums) {
    const Rows at = rows_at(rows);
    add_gradients(block, weights, at, at.routing, {shape_.per_token, first, count}, dy, sums);
  }

  // Experts shared by ranks (expert_exchange.h): the work between two exchanges of rows.

  /// Number of choices of one rank for one expert in an exchange.
  [[nodiscard]] std::size_t rows_per_exchange() const { return chunk_ / sharers_; }
  /// Device memory for rows that are sent or received, `count` each.
  struct ExchangeBuffers {
    DeviceBytes sent;       ///< [rows, H] of T: copies of rows
    DeviceBytes inputs;     ///< [rows, H] of T
    DeviceBytes gradients;  ///< [rows, H] of T: gradients of results, weighted
    DeviceBytes results;    ///< [rows, H] fp32: results, or gradients of inputs
    DeviceBytes returned;   ///< [rows, H] fp32
    DeviceBytes dots;       ///< [rows] fp32: gradients of weights, times the weights
    DeviceBytes returned_dots;
  };
  [[nodiscard]] ExchangeBuffers exchange_buffers() const;
  /// Copies the inputs of choices next to each other, by expert.
  void collect_inputs(std::byte* rows, const std::vector<ExpertChoices>& choices) {
    const Rows at = rows_at(rows);
    collect(at, choices, at.normed, nullptr);
  }
  /// Copies the gradients of the choices' results next to each other, from `dy` [N, H].
  void collect_gradients(std::byte* rows, const std::vector<ExpertChoices>& choices, const T* dy) {
    const Rows at = rows_at(rows);
    collect(at, choices, dy, at.routing.weights);
  }
  /// Computes the results of `count` inputs received from all ranks.
  void compute_received(std::size_t block, const BlockWeights<T>& weights, std::size_t count);
  /// Computes the gradients of inputs and of choices' weights from the inputs and the gradients of
  /// results received from all ranks. Adds the gradients of the expert's weights.
  void differentiate_received(std::size_t block, const BlockWeights<T>& weights, std::size_t count);
  /// Adds returned results to `sums`, in the order of experts.
  void add_returned(std::byte* rows, const std::vector<ExpertChoices>& choices, float* sums);
  /// Adds returned gradients of inputs to `sums`, and writes those of the choices' weights.
  void add_returned_gradients(std::byte* rows, const std::vector<ExpertChoices>& choices,
                              float* sums);

  /// Like forward() and backward(), for the expert of all rows. With a gate its weight is
  /// sigmoid(z), which is the softmax of (z, 0), so the gate is a router that chooses between it
  /// and nothing. Without a gate, it is the only expert of a router, which gives it the weight 1.
  void shared_forward(std::size_t block, const BlockWeights<T>& weights, std::byte* rows,
                      float* sums);
  void shared_backward(std::size_t block, const BlockWeights<T>& weights, std::byte* rows,
                       const T* dy, float* sums);

  /// Backward pass of the router, after all experts: adds the gradient of its weights, and that of
  /// the norm's result to `sums`. `scale`: gradient of the router losses; without these, `totals`
  /// are null.
  void router_backward(std::size_t block, const BlockWeights<T>& weights, std::byte* rows,
                       double* totals, float scale, float* sums);

 private:
  /// Chunks are padded to a multiple of this many rows, so that products have few shapes.
  static constexpr std::size_t kRowStep = 16;

  struct Bound {
    LinearAt router;  ///< or the gate of the expert for all rows
    std::optional<Elems> correction;
    std::vector<LinearAt> in;  ///< gate and up, or one map for both
    LinearAt out;
  };
  struct Rows {
    T* normed = nullptr;  ///< [N, H]
    Routing routing;
  };
  Rows take_rows(Bump& bump) const;
  [[nodiscard]] Rows rows_at(std::byte* place) const {
    Bump bump(place);
    return take_rows(bump);
  }

  /// Choices [first, first + count) of a routing with `per_token` choices per token.
  struct Choices {
    std::size_t per_token = 0;
    std::size_t first = 0;
    std::size_t count = 0;
  };

  void bind_maps(const BlockSpec& block, const ExpertsSpec& spec, const std::string& before,
                 Bound& bound) const;
  void bind_weights(const BlockSpec& block, const ExpertsSpec& spec, const std::string& before,
                    Bound& bound) const;

  [[nodiscard]] RouterShape gate_shape() const {
    const std::size_t choices = gates_shared_ ? 2 : 1;
    return {
        .rows = shape_.rows, .experts = choices, .per_token = choices, .factor = shared_factor_};
  }
  /// Computes the weights of all rows for the expert of all rows, which has the first N places.
  void weigh_all(std::size_t block, const BlockWeights<T>& weights, const Rows& at);
  void add_router_gradient(std::size_t block, const BlockWeights<T>& weights, const Rows& at,
                           const RouterShape& shape, float* sums);

  void add_results(std::size_t block, const BlockWeights<T>& weights, const Rows& at,
                   const Routing& routing, const Choices& choices, float* sums);
  void add_gradients(std::size_t block, BlockWeights<T> weights, const Rows& at,
                     const Routing& routing, const Choices& choices, const T* dy, float* sums);

  /// Calls work(choices, padded number of rows) for each chunk.
  template <class Work>
  void by_chunks(const Routing& routing, const Choices& choices, const Work& work) {
    for (std::size_t done = 0; done < choices.count; done += chunk_) {
      const std::size_t here = std::min(chunk_, choices.count - done);
      work(ExpertRows{routing.places + choices.first + done, here, choices.per_token},
           round_up(here, kRowStep));
    }
  }

  [[nodiscard]] GateUp<T> gate_up(std::size_t block, std::size_t rows) const {
    const bool one = bound_[block].in.size() == 1;
    const std::size_t wide = bound_[block].out.in;
    return {hidden_, hidden_ + (one ? wide : rows * wide), one ? 2 * wide : wide, rows, wide};
  }

  /// Calls work(choices, number of the first) for each expert.
  template <class Work>
  void by_experts(const Rows& at, const std::vector<ExpertChoices>& choices,
                  const Work& work) const {
    std::size_t first = 0;
    for (const ExpertChoices& own : choices) {
      work(ExpertRows{at.routing.places + own.first, own.count, shape_.per_token}, first);
      first += own.count;
    }
  }
  void collect(const Rows& at, const std::vector<ExpertChoices>& choices, const T* from,
               const float* weights);
  /// Writes zeros after `count` rows. Returns the padded number of rows.
  std::size_t pad(T* rows, std::size_t count) {
    const std::size_t padded = round_up(count, kRowStep);
    ops_.experts->gather_rows({}, rows, nullptr, rows + count * width_, padded - count, width_);
    return padded;
  }

  /// Computes the intermediates of the rows in x_.
  void compute(std::size_t block, const BlockWeights<T>& weights, std::size_t padded);
  /// Multiplies by the last map; the results are in sums_.
  void multiply_last(std::size_t block, const BlockWeights<T>& weights, std::size_t rows,
                     std::size_t padded);

  /// Backward pass of the last map, from the gradients of results in dy_.
  void differentiate(std::size_t block, const BlockWeights<T>& weights, std::size_t padded);
  /// Computes the gradients of the choices' weights.
  void multiply_weights(std::size_t block, const BlockWeights<T>& weights,
                        const ExpertRows& choices, const float* factors, float* gradients);
  /// Backward pass of gate and up. Leaves the gradient of the rows' norm result in sums_.
  void differentiate_inputs(std::size_t block, const BlockWeights<T>& weights, std::size_t padded);

  std::size_t width_;
  std::size_t wide_ = 0;  ///< I of the widest expert
  RouterShape shape_;
  RouterLosses losses_;
  Gating gating_;
  DeviceOps<T>& ops_;
  AdaptedMaps<T> maps_;
  std::vector<Bound> bound_;          ///< by block
  std::vector<std::size_t> routers_;  ///< blocks
  std::size_t chunk_ = 0;             ///< rows per chunk
  float* logits_ = nullptr;           ///< [N, step]
  T* dlogits_ = nullptr;              ///< [N, step]
  T* x_ = nullptr;                    ///< [chunk, H]
  T* dy_ = nullptr;                   ///< [chunk, H]
  T* hidden_ = nullptr;               ///< [chunk, 2 I]
  T* activated_ = nullptr;            ///< [chunk, I]
  T* dactivated_ = nullptr;           ///< [chunk, I]
  float* sums_ = nullptr;             ///< [chunk, H]
  Routing gate_;                      ///< routing of the expert for all rows
  float* moved_ = nullptr;            ///< [experts], see RouterBiases
  bool gates_shared_ = true;          ///< whether the expert for all rows has a gate
  bool corrects_ = false;             ///< whether routers have corrections
  double shared_factor_ = 1.0;        ///< multiplies the weight of the expert for all rows
  std::size_t sharers_ = 1;           ///< ranks that share a block, with one expert each
  // With several sharers, see ExchangeBuffers.
  T* sent_ = nullptr;
  float* returned_ = nullptr;
  float* dots_ = nullptr;
  float* returned_dots_ = nullptr;
};

}  // namespace ballast::model
