#include "ballast/core/memory.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "ballast/core/machine.h"
#include "ballast/core/random.h"
#include "ballast/cpu_adam/updater.h"
#include "ballast/device/device.h"
#include "ballast/engine/blueprint.h"
#include "ballast/engine/run_inputs.h"
#include "ballast/step/problem.h"

#include "src/calibrate/calibration.h"

namespace ballast::calibrate {
namespace {

std::unique_ptr<device::Device> make_device(const Sample& sample, Bytes budget, double link_gbps) {
  device::DeviceOptions options = sample.run.devices.first();
  options.budget = budget;
  options.compute_threads = 1;
  options.link_gbps = link_gbps;
  return device::make_device(options);
}

/// Copies of a layer's weights, different ones in turn.
class Copies {
 public:
  Copies(const Sample& sample, double link_gbps)
      : bytes_(step::RankSizes(sample.blueprint.problem).updated_weights(1)),
        count_(cold_copies(sample, 2 * bytes_)),
        sample_(sample),
        device_(make_device(sample, count_ * round_up(bytes_, kPage), link_gbps)),
        stream_(device_->make_stream("calibration")),
        host_(count_ * bytes_, "measuring copies"),
        pin_(device_->pin(host_.bytes(), "ballast.host_bytes")) {
    for (std::size_t i = 0; i < count_; ++i) {
      places_.push_back(device_->allocate(bytes_, "measuring copies"));
    }
    std::fill(host_.bytes().begin(), host_.bytes().end(), std::byte{1});
    // Page faults on the host device would count as copies, and disturb kernels for milliseconds.
    for (std::size_t i = 0; i < count_; ++i) upload(i);
    stream_->synchronize();
  }

  double up() {
    return rate([&](std::size_t i) { upload(i); });
  }
  /// Copies one layer's weights to the device and waits.
  void upload_next() {
    upload(next_++ % count_);
    stream_->synchronize();
  }
  double down() {
    return rate([&](std::size_t i) { device_->copy_to_host(*stream_, host(i), places_[i]); });
  }

 private:
  void upload(std::size_t i) { device_->copy_to_device(*stream_, places_[i], host(i)); }
  [[nodiscard]] HostBytes host(std::size_t i) const {
    return host_.bytes().subspan(i * bytes_, bytes_);
  }

  template <class Copy>
  double rate(Copy copy) {
    std::size_t next = 0;
    const Repeats repeats = {.seconds = 0.1, .least = 5, .most = 64};
    const double cpus = compute_team(sample_.run.devices) > 0 ? 1.0 : 0.0;
    const double seconds = sample_.measure(cpus, repeats, [&] {
      copy(next++ % count_);
      stream_->synchronize();
    });
    return static_cast<double>(bytes_) / seconds;
  }

  Bytes bytes_;
  std::size_t count_;
  const Sample& sample_;
  std::unique_ptr<device::Device> device_;
  std::unique_ptr<device::Stream> stream_;
  Mapping host_;
  std::unique_ptr<device::Pin> pin_;  ///< like in a run
  std::vector<DeviceBytes> places_;
  std::size_t next_ = 0;
};

/// Returns the bytes per second of copies from the first to the second GPU of a rank.
double measure_peers(const Sample& sample) {
  const std::vector<device::DeviceOptions>& devices = sample.run.devices.options;
  device::DeviceOptions options = sample.run.devices.first();
  const Bytes bytes = step::RankSizes(sample.blueprint.problem).updated_weights(1);
  options.budget = round_up(bytes, kPage);
  const auto first = device::make_device(options);
  options.local_rank = devices.size() > 1 ? devices[1].local_rank : devices.front().local_rank + 1;
  const auto second = device::make_device(options);
  first->connect(*second);
  const DeviceBytes from = first->allocate(bytes, "measuring copies");
  const DeviceBytes to = second->allocate(bytes, "measuring copies");
  const auto stream = first->make_stream("calibration");
  const Repeats repeats = {.seconds = 0.1, .least = 5, .most = 64};
  const double seconds = sample.measure(1.0, repeats, [&] {
    first->copy_to_other(*stream, *second, to, from);
    stream->synchronize();
  });
  return static_cast<double>(bytes) / seconds;
}

/// Fills with plausible gradients, bf16 or fp32, because updates with zeros may take another time.
void fill_gradient(HostBytes gradient) {
  constexpr std::uint64_t kSignAndFraction = 0x87ff87ff87ff87ffU;
  constexpr std::uint64_t kExponent = 0x3800380038003800U;
  auto* words = reinterpret_cast<std::uint64_t*>(gradient.data());
  for (std::size_t i = 0; i < gradient.size() / sizeof(std::uint64_t); ++i) {
    words[i] = (random_u64(1, i) & kSignAndFraction) | kExponent;
  }
}

/// Updates of a layer, different ones in turn.
class Updates {
 public:
  explicit Updates(const Sample& sample)
      : blueprint_(sample.blueprint),
        updater_(sample.run.update),
        layout_(engine::state_layout(blueprint_, 1, 0)),
        bytes_(2 * layout_.weight_bytes + layout_.state_bytes),
        copies_(cold_copies(sample, bytes_)),
        memory_(updater_.allocate(copies_ * bytes_)) {
    const Bytes gradient = layout_.weight_bytes;
    for (std::size_t i = 0; i < copies_; ++i) {
      fill_gradient(memory_.bytes().subspan((i + 1) * bytes_ - gradient, gradient));
    }
    hyper_.optimizer = blueprint_.states.optimizer;
    // Page faults would count as updates.
    for (std::size_t i = 0; i < copies_; ++i) next();
  }

  void next() {
    std::byte* const weights = memory_.bytes().data() + next_++ % copies_ * bytes_;
    std::byte* const states = weights + layout_.weight_bytes;
    updater_.step(hyper_, engine::make_shard(blueprint_, 1, 0, weights, states,
                                             states + layout_.state_bytes));
    ++hyper_.step;
  }
  [[nodiscard]] double traffic() const { return static_cast<double>(layout_.update_traffic); }
  [[nodiscard]] unsigned threads() const { return static_cast<unsigned>(updater_.threads()); }

 private:
  const engine::Blueprint& blueprint_;
  cpu_adam::Updater updater_;
  engine::StateLayout layout_;
  Bytes bytes_;
  std::size_t copies_;
  Mapping memory_;
  cpu_adam::Hyper hyper_;
  std::size_t next_ = 0;
};

}  // namespace

void measure_update(const Sample& sample, plan::Rates& rates) {
  Updates updates(sample);
  const Repeats repeats = {.seconds = 0.2, .least = 3, .most = 64};
  const double seconds = sample.measure(updates.threads(), repeats, [&] { updates.next(); });
  rates.update_per_second = updates.traffic() / seconds;
  rates.update_threads = updates.threads();
}

std::function<void()> updates(const Sample& sample) {
  const auto updates = std::make_shared<Updates>(sample);
  return [updates] { updates->next(); };
}

bool has_several_devices(const engine::DeviceRequest& devices) {
  return (devices.open ? engine::available_devices(devices) : devices.count) > 1;
}

void measure_link(const Sample& sample, plan::Rates& rates) {
  {
    Copies copies(sample, 0.0);
    rates.upload_per_second = copies.up();
    rates.offload_per_second = copies.down();
  }
  rates.link_cores = 1.0;
  const bool several = has_several_devices(sample.run.devices);
  if (!device::shares_host_cores(sample.run.devices.first())) {
    rates.peer_per_second = several ? measure_peers(sample) : 0.0;
    return;
  }
  const double link = sample.run.devices.link_gbps * 1e9;
  if (link > 0.0) {
    // The emulated link sleeps except during the copy.
    rates.link_cores = std::min(1.0, link / rates.upload_per_second);
    rates.upload_per_second = std::min(rates.upload_per_second, link);
    rates.offload_per_second = std::min(rates.offload_per_second, link);
  }
  // All copies of host devices are copies in host memory.
  rates.peer_per_second = several ? rates.upload_per_second : 0.0;
}

std::function<void()> uploads(const Sample& sample) {
  const auto copies = std::make_shared<Copies>(sample, sample.run.devices.link_gbps);
  return [copies] { copies->upload_next(); };
}

}  // namespace ballast::calibrate
