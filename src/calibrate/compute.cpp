#include "ballast/model/compute.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <memory>
#include <set>
#include <type_traits>
#include <vector>

#include "ballast/calibrate/kept_choices.h"
#include "ballast/core/cpu.h"
#include "ballast/core/random.h"
#include "ballast/device/host_stream.h"
#include "ballast/inputs/engine_inputs.h"
#include "ballast/plan/executor.h"

#include "src/calibrate/calibration.h"

namespace ballast::calibrate {
namespace {

using model::Kernel;
using model::Port;

/// Operations of at least this many seconds do not get faster with larger micro-batches.
constexpr double kLong = 0.5;
/// The config's micro-batch size is skipped if an operation would take longer than this, in
/// seconds.
constexpr double kTooLong = 2.0;
/// Longer operations need no warm-up call.
constexpr double kWarm = 0.1;
/// Shorter kernels are enqueued and timed several at a time, like in a step. If other work comes
/// between them, only kernels shorter than kVeryShort are, because a clock cannot resolve them.
constexpr double kShort = 0.02;
constexpr double kVeryShort = 0.002;
constexpr std::size_t kMostTogether = 64;

/// Values around zero. The prime length prevents equal rows in a matrix.
template <class T>
std::vector<std::byte> pattern(float scale) {
  constexpr std::size_t kValues = 65521;
  std::vector<std::byte> bytes(kValues * sizeof(T));
  auto* values = reinterpret_cast<T*>(bytes.data());
  for (std::size_t i = 0; i < kValues; ++i) {
    const float unit = static_cast<float>(random_u64(1, i) % 20001) / 10000.0F - 1.0F;
    values[i] = from_float<T>(unit * scale);
  }
  return bytes;
}

/// Kernels of the sample for micro-batches of one size, on a separate device.
class Kernels {
 public:
  Kernels(const Sample& sample, std::uint64_t sequences)
      : Kernels(sample, model::MicroBatchShape{sequences, sample.length}) {}
  Kernels(const Sample& sample, model::MicroBatchShape shape)
      : model_(sample.blueprint.model),
        type_(sample.blueprint.type),
        shape_(shape),
        accumulation_(usual_accumulation(sample.config)),
        conditions_{static_cast<double>(compute_team(sample.config)), sample.busy},
        copies_(cold_copies(sample, model_.blocks[1].elements * (size_of(type_) + sizeof(float)))),
        device_(make_device(sample)),
        stream_(device_->make_stream("calibration")),
        compute_(
            model::make_compute(*device_, model_, type_, shape_, kernel_options(sample.config))),
        program_(model::write_program(model_, type_, {.micro_batch = shape_}, compute_->sizes())),
        layers_(copies_) {
    // All memory is touched first, because page faults cost more than most kernels.
    const DeviceBytes workspace = allocate(compute_->sizes().workspace);
    fill(workspace, 1.0F);
    compute_->set_workspace(workspace);
    in_ = allocate(compute_->activation_bytes());
    out_ = allocate(compute_->activation_bytes());
    flow_ = allocate(compute_->activation_bytes());
    for (Layer& layer : layers_) {
      layer.weights = allocate(model_.blocks[1].elements * size_of(type_));
      layer.gradient = allocate(model_.blocks[1].elements * sizeof(float));
      fill(layer.weights, 0.02F);
      compute_->zero(*stream_, view_as<float>(layer.gradient));
    }
    head_weights_ = allocate(model_.blocks[2].elements * size_of(type_));
    head_gradient_ = allocate(model_.blocks[2].elements * sizeof(float));
    if (model_.config.tie_embeddings) {
      tied_weights_ = allocate(model_.blocks[0].elements * size_of(type_));
      tied_gradient_ =
          allocate(model_.config.vocab_size * model_.config.hidden_size * sizeof(float));
    }
    targets_ = allocate(shape_.tokens() * sizeof(std::int32_t));  // zeros are valid tokens
    loss_ = allocate(sizeof(double));
    fill(head_weights_, 0.02F);
    fill(tied_weights_, 0.02F);
    for (const DeviceBytes& sums : {head_gradient_, tied_gradient_}) {
      compute_->zero(*stream_, view_as<float>(sums));
    }
    fill(in_, 1.0F);
    fill(out_, 1.0F);
    fill(flow_, 1e-3F);
    stream_->synchronize();
  }

  [[nodiscard]] double tokens() const { return static_cast<double>(shape_.tokens()); }

  [[nodiscard]] double attention_flops() const {
    return model_.attention_flops(1, shape_.sequences, shape_.length);
  }
  double forward_flops() const { return model_.forward_flops(1, shape_.sequences, shape_.length); }
  double backward_flops() const {
    return 2.0 * forward_flops() + model_.recomputed_flops(1, shape_.sequences, shape_.length);
  }
  double head_flops() const {
    return 3.0 * model_.forward_flops(2, shape_.sequences, shape_.length);
  }

  double forward_seconds() {
    return seconds([&] { forward(); });
  }
  double backward_seconds() {
    return seconds([&] { backward(); });
  }
  /// Runs both passes through a layer and waits for them.
  void layer_pass() {
    forward();
    backward();
    stream_->synchronize();
  }
  double head_seconds() {
    const auto head = [&] { train_head(); };
    return seconds(head, [&] {
      // The head runs once per micro-batch: the layers evict its data from the caches.
      for (const Layer& layer : layers_) {
        compute_->zero(*stream_, view_as<float>(layer.gradient));
      }
    });
  }

  /// Bytes per second of clearing and packing buffers that are as cold as the whole model's.
  double memory_rate(const Sample& sample) {
    const Bytes accumulator = model_.blocks[1].elements * sizeof(float);
    const Bytes packed = model_.blocks[1].elements * size_of(type_);
    const std::size_t copies = cold_copies(sample, accumulator + packed);
    const auto own = make_device(sample, copies * (accumulator + packed + 2 * kPage));
    std::vector<std::array<DeviceBytes, 2>> buffers(copies);
    for (auto& [sums, values] : buffers) {
      sums = own->allocate(accumulator, "accumulator");
      values = own->allocate(packed, "packed gradient");
    }
    const auto stats = allocate(sizeof(GradientStats));
    const double time = measured_seconds(conditions_, {}, [&] {
      for (const auto& [sums, values] : buffers) {
        compute_->zero(*stream_, view_as<float>(sums));
        compute_->pack_gradient(*stream_, 1, {.own = view_as<float>(sums)}, values,
                                view_as<GradientStats>(stats));
      }
      stream_->synchronize();
    });
    return static_cast<double>(copies * (2 * accumulator + packed)) / time;
  }

 private:
  struct Layer {
    DeviceBytes weights;
    DeviceBytes gradient;
  };

  std::unique_ptr<device::Device> make_device(const Sample& sample) const {
    const Bytes workspace =
        model::kernel_memory(model_, type_, shape_,
                             device::kind_of(inputs::device_options(sample.config)),
                             sample.config.ballast.compute_threads)
            .workspace;
    const Bytes activation = shape_.tokens() * model_.config.hidden_size * size_of(type_);
    Bytes bytes = workspace + 3 * activation + shape_.tokens() * sizeof(std::int32_t);
    for (const auto& block : model_.blocks) {
      const std::size_t count = block.kind == model::BlockKind::layer ? copies_ : 1;
      bytes += count * block.elements * (size_of(type_) + sizeof(float));
    }
    constexpr Bytes kRounding = 32 * kPage;
    return make_device(sample, bytes + kRounding + 2 * copies_ * kPage);
  }
  static std::unique_ptr<device::Device> make_device(const Sample& sample, Bytes bytes) {
    device::DeviceOptions options = inputs::device_options(sample.config);
    options.budget = bytes;
    options.compute_threads = sample.config.ballast.compute_threads;
    return device::make_device(options);
  }

  /// Returns the pass of the sample's only layer or head.
  [[nodiscard]] const model::Pass& pass(Kernel kernel) const {
    return *std::ranges::find(program_.passes, kernel, &model::Pass::kernel);
  }
  void forward() {
    model::PassArguments arguments;
    arguments[Port::weights] = next_layer().weights;
    arguments[Port::input] = in_;
    arguments[Port::output] = out_;
    compute_->run(*stream_, pass(Kernel::layer), arguments);
  }
  void backward() {
    const Layer& layer = next_layer();
    model::PassArguments arguments;
    arguments[Port::weights] = layer.weights;
    arguments[Port::input] = in_;
    arguments[Port::activation_gradient] = flow_;
    arguments[Port::gradient] = layer.gradient;
    arguments.scalars.accumulation = accumulation_;
    compute_->run(*stream_, pass(Kernel::layer_backward), arguments);
  }
  void train_head() {
    model::PassArguments arguments;
    arguments[Port::weights] = head_weights_;
    arguments[Port::input] = in_;
    arguments.batch.targets = view_as<std::int32_t>(targets_);
    arguments[Port::activation_gradient] = out_;
    arguments[Port::gradient] = head_gradient_;
    arguments[Port::losses] = loss_;
    if (model_.config.tie_embeddings) {
      arguments.output_weights = {tied_weights_};
      arguments.output_gradient = {tied_gradient_};
    }
    arguments.scalars.accumulation = accumulation_;
    arguments.scalars.loss_gradient = 1e-3F;
    compute_->run(*stream_, pass(Kernel::head_train), arguments);
  }

  /// All other layers of a model also come between two uses of a layer.
  const Layer& next_layer() { return layers_[turn_++ % layers_.size()]; }

  DeviceBytes allocate(Bytes bytes) { return device_->allocate(bytes, "calibration"); }

  void fill(DeviceBytes bytes, float scale) {
    auto values =
        with_training_type(type_, [&](auto value) { return pattern<decltype(value)>(scale); });
    for (std::size_t done = 0; done < bytes.size();) {
      const std::size_t size = std::min(values.size(), bytes.size() - done);
      device_->copy_to_device(*stream_, bytes.subview(done, size), HostBytes(values).first(size));
      done += size;
    }
    stream_->synchronize();
  }

  /// Seconds of one kernel. `between` (may be empty) runs before each measurement, uncounted.
  double seconds(const std::function<void()>& enqueue, const std::function<void()>& between = {}) {
    const auto several = [&](std::size_t count) {
      for (std::size_t i = 0; i < count; ++i) enqueue();
      stream_->synchronize();
    };
    const auto time = [&] {
      SliceClock clock;
      clock.start();
      several(1);
      const Slice slice = clock.stop();
      return undisturbed_seconds({&slice, 1}, conditions_);
    };
    double once = time();
    if (once < kWarm) once = time();  // the first call initialized shared state
    // Too long for many repetitions, but a single one may have been disturbed.
    if (once >= kLong) return std::min(once, time());
    if (once >= kWarm) return measured_seconds(conditions_, {.seconds = 0.0}, [&] { several(1); });
    const double shortest = between || conditions_.busy ? kVeryShort : kShort;
    const auto together =
        std::clamp<std::size_t>(static_cast<std::size_t>(shortest / once), 1, kMostTogether);
    const Repeats repeats = {.seconds = 0.2, .least = conditions_.busy ? 3U : 5U, .most = 50};
    const auto work = [&] { several(together); };
    const auto prepare = [&] {
      if (!between) return;
      between();
      stream_->synchronize();
    };
    return measured_seconds(conditions_, repeats, work, prepare) / static_cast<double>(together);
  }

  const model::Architecture& model_;
  DType type_;
  model::MicroBatchShape shape_;
  model::Accumulation accumulation_;
  SliceConditions conditions_;
  std::size_t copies_;
  std::unique_ptr<device::Device> device_;
  std::unique_ptr<device::Stream> stream_;
  std::unique_ptr<model::Compute> compute_;
  model::StepProgram program_;
  std::vector<Layer> layers_;
  std::size_t turn_ = 0;
  DeviceBytes in_, out_, flow_, head_weights_, head_gradient_, tied_weights_, tied_gradient_,
      targets_, loss_;
};

/// Overhead of an operation, measured with two lanes that alternate in copying one byte. Waiting
/// for an idle stream would take no time, while real work on a GPU has to wake the thread.
double launch_seconds(const Sample& sample) {
  constexpr std::uint32_t kTurns = 200;
  device::DeviceOptions options = inputs::device_options(sample.config);
  options.budget = kPage;
  options.compute_threads = 1;
  const auto device = device::make_device(options);
  const auto stream = device->make_stream("calibration");
  plan::Plan plan;
  for (std::uint32_t i = 0; i < kTurns; ++i) {
    plan::Operation operation;
    operation.lane = i % 2 == 0 ? plan::Lane::compute : plan::Lane::upload;
    if (i > 0) operation.after = {i - 1};
    plan.operations.push_back(operation);
  }
  const DeviceBytes place = device->allocate(1, "calibration");
  std::array<std::byte, 1> content = {};
  const auto one_byte = [&](const plan::Operation&, std::uint64_t) {
    device->copy_to_device(*stream, place, content);
    stream->synchronize();
  };
  plan::Executor executor(one_byte, [](const auto&) { return std::string("calibration"); }, {});
  std::uint64_t run = 0;
  const auto turns = [&] {
    executor.submit(plan, ++run);
    executor.drain();
  };
  return measured_seconds({.busy = sample.busy}, {.least = 5, .most = 7}, turns) / kTurns;
}

/// Measures attention in micro-batches of `sequences` sequences, by the time that they take longer
/// than the same tokens in shorter sequences. Returns zeros if attention is too small a part of a
/// layer to be measured.
AttentionRates measure_attention(const Sample& sample, std::uint64_t sequences) {
  constexpr std::uint64_t kPieces = 8;
  constexpr double kLeastShare = 0.1;  // of a layer's FLOPs
  constexpr double kLeastTime = 0.03;  // of a layer's time, above the noise
  const std::uint64_t pieces = std::min(kPieces, sample.length);
  Kernels whole(sample, sequences);
  if (whole.attention_flops() < kLeastShare * whole.forward_flops()) return {};
  const double forward = whole.forward_seconds();
  const double backward = whole.backward_seconds();
  Kernels cut(sample, model::MicroBatchShape{sequences * pieces, sample.length / pieces});
  const double tokens = whole.tokens() / cut.tokens();
  const double more_forward = forward - tokens * cut.forward_seconds();
  // A backward pass recomputes the forward pass.
  const double more_backward = backward - tokens * cut.backward_seconds() - more_forward;
  if (more_forward < kLeastTime * forward || more_backward < kLeastTime * backward) return {};
  const double flops = whole.attention_flops() - tokens * cut.attention_flops();
  return {flops / more_forward, kAttentionBackward * flops / more_backward};
}

/// Returns whether to measure operations of `flops`. `own`: they have the config's micro-batch
/// size.
bool short_enough(const plan::Curve& curve, double flops, bool own) {
  if (curve.empty()) return true;
  return flops / curve.back().flops_per_second < (own ? kTooLong : kLong);
}

}  // namespace

int compute_team(const config::Config& config) {
  if (!device::shares_host_cores(inputs::device_options(config))) return 0;
  const int named = config.ballast.compute_threads;
  return named > 0 ? named : device::default_compute_threads();
}

std::uint64_t measurable_length(const Sample& sample) {
  constexpr std::uint64_t kShortLength = 256;
  std::uint64_t length = inputs::shape_of(sample.config).length;
  if (length <= kShortLength) return length;
  Sample shorter = sample;
  shorter.length = kShortLength;
  Kernels kernels(shorter, 1);
  const double rate = kernels.forward_flops() / kernels.forward_seconds();
  const auto seconds = [&] {
    return 3.0 * sample.blueprint.model.forward_flops(1, 1, length) / rate;
  };
  while (length > kShortLength && seconds() > kTooLong) length /= 2;
  return length;
}

void measure_compute(const Sample& sample, plan::Rates& rates) {
  const std::uint64_t own_size = sample.config.micro_sequences();
  for (const std::uint64_t size : std::set<std::uint64_t>{1, 2, 4, own_size > 0 ? own_size : 8}) {
    const bool own = size == own_size;
    const double flops = sample.blueprint.model.forward_flops(1, size, sample.length);
    if (!short_enough(rates.backward, 3.0 * flops, own)) continue;
    sample.check_interrupt();
    Kernels kernels(sample, size);
    const auto add = [&](plan::Curve& curve, double work, double seconds) {
      curve.push_back({kernels.tokens(), work / seconds});
    };
    if (rates.device_memory_per_second <= 0.0) {
      rates.device_memory_per_second = kernels.memory_rate(sample);
    }
    add(rates.forward, kernels.forward_flops(), kernels.forward_seconds());
    add(rates.backward, kernels.backward_flops(), kernels.backward_seconds());
    if (short_enough(rates.head, kernels.head_flops(), own)) {
      add(rates.head, kernels.head_flops(), kernels.head_seconds());
    }
  }
  const model::Architecture& model = sample.blueprint.model;
  const double largest = rates.forward.back().tokens / static_cast<double>(sample.length);
  sample.check_interrupt();
  separate_attention(
      rates, measure_attention(sample, static_cast<std::uint64_t>(std::llround(largest))),
      [&](double tokens) {
        const auto sequences =
            static_cast<std::uint64_t>(std::llround(tokens / static_cast<double>(sample.length)));
        return LayerFlops{.forward = model.forward_flops(1, sequences, sample.length),
                          .recomputed = model.recomputed_flops(1, sequences, sample.length),
                          .attention = model.attention_flops(1, sequences, sample.length)};
      });
  rates.launch_seconds = launch_seconds(sample);
  const int threads = compute_team(sample.config);
  if (threads == 0) return;
  rates.shared_cores = static_cast<unsigned>(usable_cpus());
  rates.compute_threads = static_cast<unsigned>(threads);
}

std::function<void()> layer_passes(const Sample& sample, const plan::Rates& rates) {
  const double length = static_cast<double>(sample.length);
  const double sequences = rates.backward.back().tokens / length;
  const auto kernels =
      std::make_shared<Kernels>(sample, static_cast<std::uint64_t>(std::llround(sequences)));
  return [kernels] { kernels->layer_pass(); };
}

}  // namespace ballast::calibrate
