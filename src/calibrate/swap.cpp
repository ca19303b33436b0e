#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <exception>
#include <memory>
#include <thread>
#include <vector>

#include "ballast/core/clocks.h"
#include "ballast/core/memory.h"
#include "ballast/core/random.h"
#include "ballast/engine/run_inputs.h"
#include "ballast/state/swap_space.h"

#include "src/calibrate/calibration.h"

namespace ballast::calibrate {
namespace {

using Clock = std::chrono::steady_clock;

/// Largest transfer of a measurement.
constexpr Bytes kMaxBytes = 64 * kMiB;
constexpr std::size_t kExtents = 3;
constexpr double kSeconds = 0.25;
constexpr std::size_t kMaxTransfers = 16;
/// Number of measurements of reading while writing; the fastest counts.
constexpr int kMixed = 3;

/// Returns the paths of a run, or their nearest existing parents.
state::SwapOptions existing_paths(state::SwapOptions options) {
  for (state::SwapPath& path : options.paths) {
    path.directory = path.existing();
    path.made_later = false;
  }
  return options;
}

/// Swap space with extents of the size of a layer's states (or of one of their sub-groups) and one
/// extent of a page, with a buffer for each.
class SwapProbe {
 public:
  SwapProbe(const Sample& sample)
      : bytes_(std::min(kMaxBytes, sample.blueprint.problem.blocks[1].sub_groups[0].state_bytes)),
        memory_(kExtents * bytes_, "measuring the swap paths") {
    std::vector<Bytes> extents(kExtents, bytes_);
    extents.push_back(kPage);
    auto* words = reinterpret_cast<std::uint64_t*>(memory_.bytes().data());
    for (std::size_t i = 0; i < memory_.bytes().size() / sizeof(std::uint64_t); ++i) {
      words[i] = random_u64(1, i);
    }
    const std::vector<HostBytes> staging = {memory_.bytes()};
    space_ = std::make_unique<state::SwapSpace>(
        state::plan_swap(existing_paths(sample.run.swap), extents), staging);
    // Allocates the file's blocks, so that later writes overwrite them like in a run.
    for (std::size_t extent = 0; extent <= kExtents; ++extent) write(extent);
  }

  std::unique_ptr<state::SwapTransfer> start_write(std::size_t extent) {
    return space_->write(extent, memory(extent), ++versions_[extent]);
  }
  std::unique_ptr<state::SwapTransfer> start_read(std::size_t extent) {
    return space_->read(extent, memory(extent), versions_[extent]);
  }
  void write(std::size_t extent) { start_write(extent)->finish(); }
  void read(std::size_t extent) { start_read(extent)->finish(); }
  [[nodiscard]] double bytes() const { return static_cast<double>(bytes_); }

 private:
  [[nodiscard]] HostBytes memory(std::size_t extent) const {
    if (extent == kExtents) return memory_.bytes().first(kPage);
    return memory_.bytes().subspan(extent * bytes_, bytes_);
  }

  Bytes bytes_;
  Mapping memory_;
  std::unique_ptr<state::SwapSpace> space_;
  std::array<std::uint64_t, kExtents + 1> versions_{};
};

/// Transfers of which the next one always starts before the current one ends, like on a lane.
class OverlappedTransfers {
 public:
  void add(std::unique_ptr<state::SwapTransfer> next) {
    if (current_) current_->finish();
    current_ = std::move(next);
  }

 private:
  std::unique_ptr<state::SwapTransfer> current_;
};

/// Bytes per second of concurrent reading and writing, and the share of reads.
struct MixedRate {
  double per_second = 0.0;
  double read_share = 0.0;
};

/// Reads one extent while another thread writes the others.
MixedRate measure_mixed(SwapProbe& probe) {
  std::atomic<bool> stop = false;
  std::atomic<std::size_t> written = 0;
  std::exception_ptr failure;
  std::exception_ptr writer_failure;
  const auto start = Clock::now();
  std::thread writer([&] {
    try {
      for (std::size_t i = 0; !stop; ++i, ++written) probe.write(1 + i % 2);
    } catch (...) {
      writer_failure = std::current_exception();
    }
  });
  std::size_t read = 0;
  try {
    while (read == 0 || (seconds_since(start) < kSeconds && read + written < 2 * kMaxTransfers)) {
      probe.read(0);
      ++read;
    }
  } catch (...) {
    failure = std::current_exception();
  }
  const std::size_t done = written;
  const double seconds = seconds_since(start);
  stop = true;
  writer.join();
  if (writer_failure) std::rethrow_exception(writer_failure);
  if (failure) std::rethrow_exception(failure);
  // On average, the last write is half done.
  const double total = static_cast<double>(read + done) + 0.5;
  return {total * probe.bytes() / seconds, static_cast<double>(read) / total};
}

}  // namespace

void measure_swap(const Sample& sample, plan::Rates& rates) {
  SwapProbe probe(sample);
  const Repeats few = {.seconds = 0.05, .least = 3, .most = 9};
  constexpr double kElsewhere = 0.0;
  const double read_latency = sample.measure(kElsewhere, few, [&] { probe.read(kExtents); });
  const double write_latency = sample.measure(kElsewhere, few, [&] { probe.write(kExtents); });
  rates.io_latency_seconds = std::min(read_latency, write_latency);
  const Repeats repeats = {.seconds = kSeconds, .least = 3, .most = kMaxTransfers};
  const double cpu = process_cpu_seconds();
  double transferred = 0.0;
  const auto queued_seconds = [&](auto start) {
    std::size_t turn = 0;
    OverlappedTransfers queued;
    const double seconds =
        sample.measure(kElsewhere, repeats, [&] { queued.add(start(turn++ % kExtents)); });
    transferred += seconds * static_cast<double>(turn);
    return seconds;
  };
  const double read = queued_seconds([&](std::size_t extent) { return probe.start_read(extent); });
  const double write =
      queued_seconds([&](std::size_t extent) { return probe.start_write(extent); });
  rates.io_cores = (process_cpu_seconds() - cpu) / transferred;
  rates.read_per_second = probe.bytes() / read;
  rates.write_per_second = probe.bytes() / write;
  MixedRate mixed = measure_mixed(probe);
  for (int i = 1; i < kMixed; ++i) {
    const MixedRate other = measure_mixed(probe);
    if (other.per_second > mixed.per_second) mixed = other;
  }
  rates.mixed_per_second = mixed.per_second;
  rates.mixed_read_share = mixed.read_share;
}

std::function<void()> transfers(const Sample& sample) {
  const auto probe = std::make_shared<SwapProbe>(sample);
  return [probe, turn = std::size_t{0}]() mutable {
    probe->read(turn++ % kExtents);
    probe->write(turn % kExtents);
  };
}

}  // namespace ballast::calibrate
