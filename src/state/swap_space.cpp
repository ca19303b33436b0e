#include "src/state/swap_space.h"

#include <fmt/format.h>

#define XXH_INLINE_ALL
#include <algorithm>
#include <exception>
#include <utility>

#include <xxhash.h>

#include "ballast/core/error.h"

namespace ballast::state {
namespace {

/// The kernel takes registered buffers of at most 1 GiB.
std::vector<HostBytes> slices(std::span<const HostBytes> memory) {
  std::vector<HostBytes> found;
  for (const HostBytes part : memory) {
    for (std::size_t start = 0; start < part.size(); start += kGiB) {
      found.push_back(part.subspan(start, std::min<std::size_t>(kGiB, part.size() - start)));
    }
  }
  return found;
}

std::vector<std::unique_ptr<SwapDevice>> make_devices(const SwapPlan& plan,
                                                      std::span<const HostBytes> staging) {
  std::vector<std::unique_ptr<SwapDevice>> devices;
  for (std::size_t p = 0; p < plan.stripe.paths(); ++p) {
    const SwapPath& path = plan.options.paths.at(p);
    auto device = std::make_unique<SwapDevice>(SwapDevice{
        aio::File::create_anonymous(path.directory, plan.stripe.file_bytes(p), plan.options.access),
        nullptr});
    device->queue = aio::make_queue(path.io, {.files = {&device->file}, .memory = slices(staging)});
    devices.push_back(std::move(device));
  }
  return devices;
}

HostBytes part_of(HostBytes data, const Run& run) {
  return data.subspan(run.start, run.bytes);
}

HostBytes chunk_of(HostBytes data, Bytes start) {
  return data.subspan(start, std::min<std::size_t>(kChunk, data.size() - start));
}

}  // namespace

/// The transfers of one call. All of them have ended when it is destroyed.
class SwapSpace::Transfers {
 public:
  Transfers(SwapSpace& space, aio::Direction direction, bool ahead)
      : space_(space), direction_(direction), ahead_(ahead) {}
  ~Transfers() {
    while (waited_ < pending_.size()) static_cast<void>(wait());
  }
  Transfers(const Transfers&) = delete;
  Transfers& operator=(const Transfers&) = delete;

  /// Hands over `runs` of an extent whose bytes are `data`, to each path at once what is its.
  void submit(std::span<const Run> runs, HostBytes data) {
    for (std::size_t path = 0; path < space_.devices_.size(); ++path) {
      SwapDevice& device = *space_.devices_[path];
      std::vector<aio::Request> requests;
      std::vector<const Run*> these;
      for (const Run& run : runs) {
        if (run.path != path) continue;
        requests.push_back({.direction = direction_,
                            .file = &device.file,
                            .offset = run.offset,
                            .lease = Lease(part_of(data, run)),
                            .ahead = ahead_});
        these.push_back(&run);
      }
      if (requests.empty()) continue;
      pending_.reserve(pending_.size() + these.size());
      const std::vector<aio::Ticket> tickets = device.queue->submit(requests);
      for (std::size_t i = 0; i < tickets.size(); ++i) pending_.push_back({these[i], tickets[i]});
    }
  }

  /// Waits for all, hands each run that has come to `then` while others are under way, and throws
  /// the first failure last.
  template <class Then>
  void finish(std::string_view stage, Then then) {
    // In the order of the extent: the paths take turns, as their runs do.
    std::sort(pending_.begin(), pending_.end(),
              [](const Pending& a, const Pending& b) { return a.run->start < b.run->start; });
    std::exception_ptr failure;
    while (waited_ < pending_.size()) {
      const Run& run = *pending_[waited_].run;
      const aio::Completion completion = wait();
      if (failure) continue;
      try {
        completion.check(stage);
        then(run);
      } catch (const Error&) {
        failure = std::current_exception();
      }
    }
    if (failure) std::rethrow_exception(failure);
  }

 private:
  struct Pending {
    const Run* run;
    aio::Ticket ticket;
  };

  aio::Completion wait() {
    const Pending& next = pending_[waited_++];
    return space_.devices_[next.run->path]->queue->wait(next.ticket);
  }

  SwapSpace& space_;
  aio::Direction direction_;
  bool ahead_;
  std::vector<Pending> pending_;
  std::size_t waited_ = 0;
};

SwapSpace::SwapSpace(const SwapPlan& plan, std::span<const HostBytes> staging)
    : SwapSpace(plan.stripe, make_devices(plan, staging)) {}

SwapSpace::SwapSpace(Stripe stripe, std::vector<std::unique_ptr<SwapDevice>> devices)
    : stripe_(std::move(stripe)), devices_(std::move(devices)), seals_(stripe_.chunks()) {
  expects(devices_.size() == stripe_.paths(), "swap space: a device per path");
  for (std::size_t p = 0; p < devices_.size(); ++p) {
    const aio::File& file = devices_[p]->file;
    expects(file.size() >= stripe_.file_bytes(p), "swap space: the file is too small");
    if (kPage % file.alignment() != 0) {
      throw Error(ErrorCategory::io,
                  fmt::format("{}: direct I/O there is in multiples of {} bytes, swapping in "
                              "multiples of {}; choose another path or set aio.buffered to true",
                              file.name(), file.alignment(), kPage));
    }
    const std::string_view name = devices_[p]->queue->backend();
    if (backend_.find(name) == std::string::npos) {
      backend_ += fmt::format("{}{}", backend_.empty() ? "" : " and ", name);
    }
  }
}

SwapSpace::~SwapSpace() {
  // Nobody waits for anything any more: what is queued need not be carried out.
  for (const auto& device : devices_) device->queue->cancel();
}

void SwapSpace::write(std::size_t extent, HostBytes data, std::uint64_t version) {
  expects(data.size() == stripe_.extent_bytes(extent), "swap space: not the extent's size");
  Transfers transfers(*this, aio::Direction::write, false);
  // One by one: the device has work while the next checksum is computed.
  for (const Run& run : stripe_.runs(extent)) {
    seal(extent, run, data, version);
    transfers.submit({&run, 1}, data);
  }
  transfers.finish("writeback", [](const Run&) {});
}

void SwapSpace::read(std::size_t extent, HostBytes data, std::uint64_t version, bool ahead) {
  expects(data.size() == stripe_.extent_bytes(extent), "swap space: not the extent's size");
  Transfers transfers(*this, aio::Direction::read, ahead);
  transfers.submit(stripe_.runs(extent), data);
  transfers.finish("fetch", [&](const Run& run) { verify(extent, run, data, version); });
}

std::vector<aio::QueueCounters> SwapSpace::counters() const {
  std::vector<aio::QueueCounters> found;
  found.reserve(devices_.size());
  for (const auto& device : devices_) found.push_back(device->queue->counters());
  return found;
}

void SwapSpace::seal(std::size_t extent, const Run& run, HostBytes data, std::uint64_t version) {
  std::size_t number = stripe_.first_chunk(extent) + run.start / kChunk;
  const HostBytes bytes = part_of(data, run);
  for (Bytes start = 0; start < bytes.size(); start += kChunk) {
    const HostBytes chunk = chunk_of(bytes, start);
    seals_[number++] = {XXH3_64bits(chunk.data(), chunk.size()), version, true};
  }
}

void SwapSpace::verify(std::size_t extent, const Run& run, HostBytes data,
                       std::uint64_t version) const {
  std::size_t number = stripe_.first_chunk(extent) + run.start / kChunk;
  const HostBytes bytes = part_of(data, run);
  for (Bytes start = 0; start < bytes.size(); start += kChunk) {
    const HostBytes chunk = chunk_of(bytes, start);
    const Seal& seal = seals_[number++];
    const auto fail = [&](const std::string& what) {
      throw Error(ErrorCategory::state, fmt::format("fetch: read {} offset={} length={}: {}",
                                                    devices_[run.path]->file.name(),
                                                    run.offset + start, chunk.size(), what));
    };
    if (!seal.written || seal.version != version) {
      fail(fmt::format("holds version {}, version {} was wanted",
                       seal.written ? std::to_string(seal.version) : "none", version));
    }
    if (XXH3_64bits(chunk.data(), chunk.size()) != seal.checksum) {
      fail("checksum mismatch, the disk returned other bytes than were written; check the drive");
    }
  }
}

}  // namespace ballast::state
