#include <algorithm>
#include <cmath>
#include <limits>

#include "src/device/cuda/eight_values.h"
#include "src/model/compute/formulas.h"
#include "src/model/cuda/experts/experts.h"
#include "src/model/cuda/rows/row_threads.h"

namespace ballast::model::cuda {
namespace {

static_assert(kRouterThreads == kRowsOfBlock * kWarp);
/// Bits per word in the set of a row's experts.
constexpr unsigned kBits = 32;
constexpr unsigned kNoCandidate = std::numeric_limits<unsigned>::max();

/// The part of a RouterShape that kernels use.
struct Shape {
  std::size_t rows;
  unsigned experts;
  unsigned per_token;
  std::size_t step;  ///< row stride of logits and of their gradients
  bool renormalises;
  bool sigmoid;
  unsigned groups;
  unsigned kept_groups;
  double factor;
  double least_sum;
};
Shape shape_of(const RouterShape& shape) {
  return {.rows = shape.rows,
          .experts = static_cast<unsigned>(shape.experts),
          .per_token = static_cast<unsigned>(shape.per_token),
          .step = shape.step(),
          .renormalises = shape.renormalises,
          .sigmoid = shape.sigmoid,
          .groups = static_cast<unsigned>(shape.groups),
          .kept_groups = static_cast<unsigned>(shape.kept_groups),
          .factor = shape.factor,
          .least_sum = shape.least_sum};
}

/// Launches one warp per row.
device::LaunchConfig by_warps(cudaStream_t stream, std::size_t rows) {
  return {.stream = stream, .blocks = blocks_for(rows, kRowsOfBlock), .threads = kRouterThreads};
}

/// Returns the largest logit of a row, ignoring NaN.
__device__ float largest_of(const float* logits, unsigned experts) {
  float most = -HUGE_VALF;
  for (unsigned e = threadIdx.x % kWarp; e < experts; e += kWarp) {
    most = logits[e] > most ? logits[e] : most;
  }
  for (unsigned step = kWarp / 2; step > 0; step /= 2) {
    const float other = __shfl_xor_sync(device::kAllLanes, most, static_cast<int>(step));
    most = other > most ? other : most;
  }
  return most;
}

/// Writes the probabilities of a row. Returns the logarithm of the softmax's sum. A lane later
/// reads only what it has written.
__device__ double softmax(const float* logits, unsigned experts, float* probabilities) {
  const unsigned lane = threadIdx.x % kWarp;
  const float largest = largest_of(logits, experts);
  double total = 0.0;
  for (unsigned e = lane; e < experts; e += kWarp) {
    const float exponential = formulas::probability(logits[e], 1.0F, largest);
    probabilities[e] = exponential;
    total += static_cast<double>(exponential);
  }
  total = device::warp_sum(total);
  const auto divisor = static_cast<float>(total);
  for (unsigned e = lane; e < experts; e += kWarp) probabilities[e] /= divisor;
  return static_cast<double>(largest) + ::log(total);
}

/// Writes the sigmoids of a row. Returns their sum.
__device__ double sigmoids(const float* logits, unsigned experts, float* scores) {
  double total = 0.0;
  for (unsigned e = threadIdx.x % kWarp; e < experts; e += kWarp) {
    scores[e] = static_cast<float>(formulas::sigmoid(static_cast<double>(logits[e])));
    total += static_cast<double>(scores[e]);
  }
  return device::warp_sum(total);
}

/// Replaces the logits of a row by corrected scores. A lane reads the scores that it has written.
template <class T>
__device__ void correct(float* logits, const RouterBiases<T>& biases, unsigned experts,
                        const float* scores) {
  for (unsigned e = threadIdx.x % kWarp; e < experts; e += kWarp) {
    float added = 0.0F;
    if (biases.moved != nullptr) {
      added = biases.moved[e];
    } else if (biases.correction != nullptr) {
      for (unsigned a = 0; a < kAddends; ++a) {
        added += device::widen(biases.correction[a * experts + e]);
      }
    }
    logits[e] = scores[e] + added;
  }
  __syncwarp();  // all lanes see the scores
}

/// Returns the sum of the two largest scores.
__device__ float two_best(const float* scores, unsigned count) {
  float best = -HUGE_VALF;
  float second = -HUGE_VALF;
  for (unsigned i = 0; i < count; ++i) {
    const float score = scores[i];
    if (score > best) {
      second = best;
      best = score;
    } else if (score > second) {
      second = score;
    }
  }
  return best + second;
}

/// Gives the experts of all groups but the best the lowest score. `of_group` [groups]: shared
/// memory of the warp.
__device__ void drop_groups(const Shape& shape, float* scores, float* of_group) {
  const unsigned lane = threadIdx.x % kWarp;
  const unsigned size = shape.experts / shape.groups;
  for (unsigned g = lane; g < shape.groups; g += kWarp) {
    of_group[g] = two_best(scores + g * size, size);
  }
  __syncwarp();
  for (unsigned g = lane; g < shape.groups; g += kWarp) {
    unsigned better = 0;
    for (unsigned other = 0; other < shape.groups; ++other) {
      const bool ahead = of_group[other] == of_group[g] ? other < g : of_group[other] > of_group[g];
      better += ahead ? 1 : 0;
    }
    if (better < shape.kept_groups) continue;
    for (unsigned i = 0; i < size; ++i) scores[g * size + i] = -HUGE_VALF;
  }
  __syncwarp();
}

/// The divisor of a token's weights. `sum`: that of the chosen probabilities.
__device__ double divisor_of(const Shape& shape, double sum) {
  if (!shape.renormalises) return 1.0;
  if (shape.sigmoid) return sum + kLeastScoreSum;
  return sum < shape.least_sum ? shape.least_sum : sum;
}

/// The set of experts that a row has chosen, one bit each, in shared memory.
class ChosenExperts {
 public:
  __device__ ChosenExperts(std::uint32_t* words, unsigned experts) : words_(words) {
    for (unsigned i = threadIdx.x % kWarp; i * kBits < experts; i += kWarp) words_[i] = 0;
    __syncwarp();
  }
  __device__ bool has(unsigned expert) const {
    return (words_[expert / kBits] >> expert % kBits & 1U) != 0;
  }
  __device__ void add(unsigned expert) {
    __syncwarp();  // all lanes are done reading
    if (threadIdx.x % kWarp == 0) words_[expert / kBits] |= 1U << expert % kBits;
    __syncwarp();
  }
  /// Returns the first remaining expert from `expert` on. There must be one.
  __device__ unsigned first_left(unsigned expert) const {
    while (has(expert)) ++expert;
    return expert;
  }

 private:
  std::uint32_t* words_;
};

/// Returns the remaining expert with the largest logit, the first one on a tie. `first`: the first
/// remaining expert.
__device__ unsigned best_of(const float* logits, unsigned experts, const ChosenExperts& taken,
                            unsigned first) {
  // A NaN counts as the largest.
  if (logits[first] != logits[first]) return first;
  float most = -HUGE_VALF;
  unsigned best = kNoCandidate;
  const auto offer = [&](float logit, unsigned expert) {
    if (!(logit > most || (logit == most && expert < best))) return;
    most = logit;
    best = expert;
  };
  for (unsigned e = first / kWarp * kWarp + threadIdx.x % kWarp; e < experts; e += kWarp) {
    if (!taken.has(e)) offer(logits[e], e);
  }
  for (unsigned step = kWarp / 2; step > 0; step /= 2) {
    const float logit = __shfl_xor_sync(device::kAllLanes, most, static_cast<int>(step));
    const unsigned expert = __shfl_xor_sync(device::kAllLanes, best, static_cast<int>(step));
    offer(logit, expert);
  }
  return best;
}

/// Writes the values of a padding row.
__device__ void decide_nothing(const Shape& shape, std::size_t row, const Routing& to) {
  const unsigned lane = threadIdx.x % kWarp;
  for (unsigned e = lane; e < shape.experts; e += kWarp) {
    to.probabilities[row * shape.experts + e] = 0.0F;
  }
  for (unsigned k = lane; k < shape.per_token; k += kWarp) {
    to.weights[row * shape.per_token + k] = 0.0F;
    to.chosen[row * shape.per_token + k] = kNoExpert;
  }
  if (lane == 0) to.log_sums[row] = 0.0F;
}

/// Scores, choice and weights, with one warp per row.
template <class T>
__global__ void __launch_bounds__(kRouterThreads)
    decide(Shape shape, float* logits, RouterBiases<T> biases, const std::int32_t* targets,
           Routing to) {
  const Team<RowFit::warp> team;
  const std::size_t row = team.number();
  if (row >= shape.rows) return;  // the whole warp returns
  if (targets != nullptr && targets[row] == kPaddingTarget) return decide_nothing(shape, row, to);
  float* const own = logits + row * shape.step;
  if (biases.logits != nullptr) {
    for (unsigned e = team.rank(); e < shape.experts; e += kWarp) {
      own[e] += device::widen(biases.logits[e]);
    }
    __syncwarp();  // all lanes see the sums
  }
  float* const probabilities = to.probabilities + row * shape.experts;
  const double log_sum = shape.sigmoid ? sigmoids(own, shape.experts, probabilities)
                                       : softmax(own, shape.experts, probabilities);
  if (shape.sigmoid || biases.moved != nullptr || biases.correction != nullptr) {
    correct(own, biases, shape.experts, probabilities);
  }
  if (team.rank() == 0) to.log_sums[row] = static_cast<float>(log_sum);
  const unsigned words = (shape.experts + kBits - 1) / kBits;
  std::uint32_t* const shared = device::dynamic_shared<std::uint32_t>();
  if (shape.groups > 1) {
    drop_groups(shape, own,
                reinterpret_cast<float*>(shared + kRowsOfBlock * words) +
                    threadIdx.x / kWarp * shape.groups);
  }
  ChosenExperts taken(shared + threadIdx.x / kWarp * words, shape.experts);
  std::int32_t* const chosen = to.chosen + row * shape.per_token;
  float* const weights = to.weights + row * shape.per_token;
  unsigned first = 0;
  double sum = 0.0;
  for (unsigned k = 0; k < shape.per_token; ++k) {
    first = taken.first_left(first);
    const unsigned expert = best_of(own, shape.experts, taken, first);
    taken.add(expert);
    const float weight = probabilities[expert];
    sum += static_cast<double>(weight);
    if (team.rank() == 0) {
      chosen[k] = static_cast<std::int32_t>(expert);
      weights[k] = weight;
    }
  }
  const double divisor = divisor_of(shape, sum);
  __syncwarp();
  for (unsigned k = team.rank(); k < shape.per_token; k += kWarp) {
    weights[k] = static_cast<float>(static_cast<double>(weights[k]) / divisor * shape.factor);
  }
}

/// Values that are arguments of a kernel.
struct PassedValues {
  static constexpr unsigned kMax = 256;
  float values[kMax];
  unsigned count;
};

__global__ void __launch_bounds__(PassedValues::kMax) put_passed(PassedValues from, float* to) {
  if (threadIdx.x < from.count) to[threadIdx.x] = from.values[threadIdx.x];
}

/// A router's results, and further inputs of its logits' gradients.
struct Derivatives {
  Shape shape;
  Routing routing;
  const double* choices;  ///< choices of all routers; null: without router losses
  RouterLossScales scales;
};

/// The part of a row's gradients that comes from the router losses. A warp computes it.
struct OfLosses {
  const double* choices = nullptr;
  double balance = 0.0;  ///< contribution of one choice to a probability's gradient
  double z = 0.0;

  __device__ explicit OfLosses(const Derivatives& of) {
    if (of.choices == nullptr) return;
    double all = 0.0;
    for (unsigned e = threadIdx.x % kWarp; e < of.shape.experts; e += kWarp) all += of.choices[e];
    const double rows = device::warp_sum(all) / static_cast<double>(of.shape.per_token);
    if (!(rows > 0.0)) return;
    choices = of.choices;
    balance = static_cast<double>(static_cast<float>(of.scales.balance / rows)) / rows;
    z = static_cast<double>(static_cast<float>(of.scales.z / rows));
  }
  /// Returns the load-balancing loss's part of the gradient of a probability.
  __device__ double of_balance(unsigned expert) const {
    return choices == nullptr ? 0.0 : balance * choices[expert];
  }
};

/// There is one warp per row. First writes the gradients as if no expert were chosen.
template <class T>
__global__ void __launch_bounds__(kRouterThreads)
    differentiate_router(Derivatives of, T* gradients) {
  const Team<RowFit::warp> team;
  const std::size_t row = team.number();
  if (row >= of.shape.rows) return;
  const Shape& shape = of.shape;
  const unsigned experts = shape.experts;
  const unsigned per_token = shape.per_token;
  const float* const probabilities = of.routing.probabilities + row * experts;
  const std::int32_t* const chosen = of.routing.chosen + row * per_token;
  const float* const weights = of.routing.weights + row * per_token;
  const float* const weight_gradients = of.routing.weight_gradients + row * per_token;
  T* const to = gradients + row * shape.step;
  if (chosen[0] == kNoExpert) {
    for (unsigned e = team.rank(); e < experts; e += kWarp) device::narrow(0.0F, to[e]);
    return;
  }
  const OfLosses losses(of);
  double sum = 0.0;
  double along = 0.0;
  for (unsigned k = team.rank(); k < per_token; k += kWarp) {
    sum += static_cast<double>(probabilities[chosen[k]]);
    along += static_cast<double>(weight_gradients[k]) * static_cast<double>(weights[k]);
  }
  sum = device::warp_sum(sum);
  const double divisor = divisor_of(shape, sum);
  const bool is_constant = !shape.sigmoid && sum < shape.least_sum;
  along = shape.renormalises && !is_constant ? device::warp_sum(along) : 0.0;
  const auto of_choice = [&](unsigned k) {
    return (static_cast<double>(weight_gradients[k]) * shape.factor - along) / divisor;
  };
  if (shape.sigmoid) {
    for (unsigned e = team.rank(); e < experts; e += kWarp) device::narrow(0.0F, to[e]);
    __syncwarp();
    for (unsigned k = team.rank(); k < per_token; k += kWarp) {
      const auto score = static_cast<double>(probabilities[chosen[k]]);
      device::narrow(static_cast<float>(of_choice(k) * score * (1.0 - score)), to[chosen[k]]);
    }
    return;
  }
  double mean = 0.0;
  for (unsigned e = team.rank(); e < experts; e += kWarp) {
    mean += losses.of_balance(e) * static_cast<double>(probabilities[e]);
  }
  for (unsigned k = team.rank(); k < per_token; k += kWarp) {
    mean += of_choice(k) * static_cast<double>(probabilities[chosen[k]]);
  }
  const double rest =
      losses.z * static_cast<double>(of.routing.log_sums[row]) - device::warp_sum(mean);
  const auto write = [&](unsigned expert, double of_weight) {
    const double gradient = of_weight + losses.of_balance(expert) + rest;
    device::narrow(static_cast<float>(static_cast<double>(probabilities[expert]) * gradient),
                   to[expert]);
  };
  for (unsigned e = team.rank(); e < experts; e += kWarp) write(e, 0.0);
  __syncwarp();
  for (unsigned k = team.rank(); k < per_token; k += kWarp) {
    write(static_cast<unsigned>(chosen[k]), of_choice(k));
  }
}

}  // namespace

cudaError_t put_values(cudaStream_t stream, std::span<const float> values, float* to) {
  for (std::size_t at = 0; at < values.size(); at += PassedValues::kMax) {
    const auto part =
        values.subspan(at, std::min<std::size_t>(PassedValues::kMax, values.size() - at));
    PassedValues from = {};
    std::copy(part.begin(), part.end(), from.values);
    from.count = static_cast<unsigned>(part.size());
    const cudaError_t code = device::launch(
        {.stream = stream, .blocks = 1, .threads = PassedValues::kMax}, &put_passed, from, to + at);
    if (code != cudaSuccess) return code;
  }
  return cudaSuccess;
}

template <class T>
cudaError_t route(cudaStream_t stream, const RouterShape& shape, float* logits,
                  const RouterBiases<T>& biases, const std::int32_t* targets, const Routing& to,
                  std::int32_t* starts, float* partials) {
  if (shape.rows > 0) {
    device::LaunchConfig how = by_warps(stream, shape.rows);
    const std::size_t words = (shape.experts + kBits - 1) / kBits;
    static_assert(sizeof(std::uint32_t) == sizeof(float));
    how.shared_bytes = kRowsOfBlock * (words + shape.groups) * sizeof(std::uint32_t);
    const cudaError_t code =
        device::launch(how, &decide<T>, shape_of(shape), logits, biases, targets, to);
    if (code != cudaSuccess) return code;
  }
  return sort_choices(stream, shape, to, starts, reinterpret_cast<std::int32_t*>(partials));
}

template <class T>
cudaError_t router_gradient(cudaStream_t stream, const RouterShape& shape, const Routing& routing,
                            const RouterTotals& totals, const RouterLossScales& scales,
                            T* gradients) {
  if (shape.rows == 0) return cudaSuccess;
  const Derivatives of = {
      .shape = shape_of(shape), .routing = routing, .choices = totals.choices, .scales = scales};
  return device::launch(by_warps(stream, shape.rows), &differentiate_router<T>, of, gradients);
}

template cudaError_t route(cudaStream_t, const RouterShape&, float*, const RouterBiases<float>&,
                           const std::int32_t*, const Routing&, std::int32_t*, float*);
template cudaError_t route(cudaStream_t, const RouterShape&, float*, const RouterBiases<Bf16>&,
                           const std::int32_t*, const Routing&, std::int32_t*, float*);
template cudaError_t route(cudaStream_t, const RouterShape&, float*, const RouterBiases<F16>&,
                           const std::int32_t*, const Routing&, std::int32_t*, float*);
template cudaError_t router_gradient(cudaStream_t, const RouterShape&, const Routing&,
                                     const RouterTotals&, const RouterLossScales&, float*);
template cudaError_t router_gradient(cudaStream_t, const RouterShape&, const Routing&,
                                     const RouterTotals&, const RouterLossScales&, Bf16*);
template cudaError_t router_gradient(cudaStream_t, const RouterShape&, const Routing&,
                                     const RouterTotals&, const RouterLossScales&, F16*);

}  // namespace ballast::model::cuda
