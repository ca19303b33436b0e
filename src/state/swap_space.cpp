#include "ballast/state/swap_space.h"

#include <algorithm>
#include <exception>
#include <utility>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/state/checksum.h"

namespace ballast::state {
namespace {

std::vector<std::unique_ptr<SwapDevice>> make_devices(const SwapPlan& plan,
                                                      std::span<const HostBytes> staging) {
  std::vector<std::unique_ptr<SwapDevice>> devices;
  for (std::size_t p = 0; p < plan.stripe.paths(); ++p) {
    const SwapPath& path = plan.options.paths.at(p);
    auto device = std::make_unique<SwapDevice>(SwapDevice{
        plan.files.empty() ? aio::File::create_anonymous(path.directory, plan.stripe.file_bytes(p),
                                                         plan.options.access)
                           : aio::File::open_swap(plan.files.at(p), path.directory,
                                                  plan.stripe.file_bytes(p), plan.options.access),
        nullptr, path.directory});
    device->queue = aio::make_queue(
        path.io, {.files = {&device->file}, .memory = {staging.begin(), staging.end()}});
    devices.push_back(std::move(device));
  }
  return devices;
}

std::uint64_t checksum_of_zeros(Bytes size) {
  const auto compute = [](Bytes count) { return checksum(std::vector<std::byte>(count)); };
  static const std::uint64_t whole = compute(kChunk);
  return size == kChunk ? whole : compute(size);
}

HostBytes chunk_of(HostBytes data, Bytes start) {
  return data.subspan(start, std::min<std::size_t>(kChunk, data.size() - start));
}

}  // namespace

/// The requests of one extent. The destructor waits for them.
class SwapSpace::ExtentTransfer : public SwapTransfer {
 public:
  ExtentTransfer(SwapSpace& space, std::size_t extent, HostBytes data, std::uint64_t version)
      : space_(space), extent_(extent), data_(data), version_(version) {
    expects(data.size() == space.stripe_.extent_bytes(extent),
            "swap space: the data does not have the extent's size");
    pending_.reserve(space.stripe_.segments(extent).size());
  }
  ~ExtentTransfer() override {
    while (waited_ < pending_.size()) static_cast<void>(wait());
  }
  ExtentTransfer(const ExtentTransfer&) = delete;
  ExtentTransfer& operator=(const ExtentTransfer&) = delete;

 protected:
  [[nodiscard]] HostBytes bytes_of(const Segment& segment) const {
    return data_.subspan(segment.start, segment.bytes);
  }
  [[nodiscard]] std::span<Seal> seals(const Segment& segment) {
    return space_.seals(extent_, segment);
  }
  [[nodiscard]] std::span<const Segment> segments() const {
    return space_.stripe_.segments(extent_);
  }
  [[nodiscard]] const std::string& file_of(const Segment& segment) const {
    return space_.devices_[segment.path]->file.name();
  }
  [[nodiscard]] std::uint64_t version() const { return version_; }

  /// Submits `segments`, with one batch per path.
  void submit(std::span<const Segment> segments, aio::Direction direction, bool ahead) {
    for (std::size_t path = 0; path < space_.devices_.size(); ++path) {
      SwapDevice& device = *space_.devices_[path];
      std::vector<aio::Request> requests;
      std::vector<const Segment*> these;
      for (const Segment& segment : segments) {
        if (segment.path != path) continue;
        requests.push_back({.direction = direction,
                            .file = &device.file,
                            .offset = segment.offset,
                            .memory = bytes_of(segment),
                            .ahead = ahead});
        these.push_back(&segment);
      }
      if (requests.empty()) continue;
      const std::vector<aio::Ticket> tickets = device.queue->submit(requests);
      for (std::size_t i = 0; i < tickets.size(); ++i) pending_.push_back({these[i], tickets[i]});
    }
  }

  /// Waits for all requests and calls `then` for each finished segment. Throws the first failure at
  /// the end.
  template <class Then>
  void wait_for_all(std::string_view stage, Then then) {
    // Waits in the order of the extent, in which the paths alternate.
    std::sort(pending_.begin(), pending_.end(), [](const Pending& a, const Pending& b) {
      return a.segment->start < b.segment->start;
    });
    std::exception_ptr failure;
    while (waited_ < pending_.size()) {
      const Segment& segment = *pending_[waited_].segment;
      const aio::Completion completion = wait();
      if (failure) continue;
      try {
        completion.check(stage);
        then(segment);
      } catch (const Error&) {
        failure = std::current_exception();
      }
    }
    if (failure) std::rethrow_exception(failure);
  }

 private:
  struct Pending {
    const Segment* segment;
    aio::Ticket ticket;
  };

  aio::Completion wait() {
    const Pending& next = pending_[waited_++];
    return space_.devices_[next.segment->path]->queue->wait(next.ticket);
  }

  SwapSpace& space_;
  std::size_t extent_;
  HostBytes data_;
  std::uint64_t version_;
  std::vector<Pending> pending_;
  std::size_t waited_ = 0;
};

class SwapSpace::Writing final : public ExtentTransfer {
 public:
  using ExtentTransfer::ExtentTransfer;

  /// Submits each segment immediately, so that the disk works while the next checksum is computed.
  void start(Bytes zeros_from) {
    for (const Segment& segment : segments()) {
      const bool there = segment.start >= zeros_from && is_untouched(segment);
      seal(segment, there);
      if (!there) submit({&segment, 1}, aio::Direction::write, false);
    }
  }

  void finish() override {
    try {
      wait_for_all("writeback", [](const Segment&) {});
    } catch (const Error&) {
      for (const Segment& segment : segments()) {
        for (Seal& seal : seals(segment)) seal.written = false;
      }
      throw;
    }
  }

 private:
  [[nodiscard]] bool is_untouched(const Segment& segment) {
    const auto here = seals(segment);
    return std::none_of(here.begin(), here.end(), [](const Seal& seal) { return seal.touched; });
  }

  /// `zero`: nothing is written, because the file reads as zeros there.
  void seal(const Segment& segment, bool zero) {
    Bytes start = 0;
    for (Seal& seal : seals(segment)) {
      const HostBytes chunk = chunk_of(bytes_of(segment), start);
      seal = {zero ? checksum_of_zeros(chunk.size()) : checksum(chunk), version(), true, !zero};
      start += kChunk;
    }
  }
};

class SwapSpace::Reading final : public ExtentTransfer {
 public:
  using ExtentTransfer::ExtentTransfer;

  void start(bool ahead) { submit(segments(), aio::Direction::read, ahead); }

  void finish() override {
    wait_for_all("fetch", [&](const Segment& segment) { verify(segment); });
  }

 private:
  void verify(const Segment& segment) {
    Bytes start = 0;
    for (const Seal& seal : seals(segment)) {
      const HostBytes chunk = chunk_of(bytes_of(segment), start);
      const auto fail = [&](const std::string& what) {
        throw Error(ErrorCategory::state,
                    fmt::format("fetch: read {} offset={} length={}: {}", file_of(segment),
                                segment.offset + start, chunk.size(), what));
      };
      if (!seal.written || seal.version != version()) {
        fail(fmt::format("holds version {}, expected version {}",
                         seal.written ? std::to_string(seal.version) : "none", version()));
      }
      if (checksum(chunk) != seal.checksum) {
        fail(
            "checksum mismatch: the disk returned different bytes than were written; check the "
            "drive");
      }
      start += kChunk;
    }
  }
};

SwapSpace::SwapSpace(const SwapPlan& plan, std::span<const HostBytes> staging)
    : SwapSpace(plan.stripe, make_devices(plan, staging)) {}

SwapSpace::SwapSpace(Stripe stripe, std::vector<std::unique_ptr<SwapDevice>> devices)
    : stripe_(std::move(stripe)), devices_(std::move(devices)), seals_(stripe_.chunks()) {
  expects(devices_.size() == stripe_.paths(), "swap space: needs one device per path");
  for (std::size_t p = 0; p < devices_.size(); ++p) {
    const aio::File& file = devices_[p]->file;
    expects(file.size() >= stripe_.file_bytes(p), "swap space: the file is too small");
    if (kPage % file.alignment() != 0) {
      throw Error(ErrorCategory::io,
                  fmt::format("{}: direct I/O needs multiples of {} bytes, but swapping uses "
                              "multiples of {} bytes; give another nvme_path or set aio.buffered "
                              "to true",
                              file.name(), file.alignment(), kPage));
    }
    const std::string_view name = devices_[p]->queue->backend();
    if (backend_.find(name) == std::string::npos) {
      backend_ += fmt::format("{}{}", backend_.empty() ? "" : " and ", name);
    }
  }
}

SwapSpace::~SwapSpace() {
  // Queued requests are not needed any more.
  for (const auto& device : devices_) device->queue->cancel();
}

std::unique_ptr<SwapTransfer> SwapSpace::write(std::size_t extent, HostBytes data,
                                               std::uint64_t version, Bytes zeros_from) {
  auto writing = std::make_unique<Writing>(*this, extent, data, version);
  writing->start(zeros_from);
  return writing;
}

std::unique_ptr<SwapTransfer> SwapSpace::read(std::size_t extent, HostBytes data,
                                              std::uint64_t version, bool ahead) {
  auto reading = std::make_unique<Reading>(*this, extent, data, version);
  reading->start(ahead);
  return reading;
}

std::vector<aio::QueueCounters> SwapSpace::counters() const {
  std::vector<aio::QueueCounters> found;
  found.reserve(devices_.size());
  for (const auto& device : devices_) found.push_back(device->queue->counters());
  return found;
}

SwapImage SwapSpace::image() const {
  SwapImage image = {.weights = stripe_.weights(), .segment_bytes = stripe_.segment_bytes()};
  for (std::size_t e = 0; e < stripe_.extents(); ++e) {
    image.extents.push_back(stripe_.extent_bytes(e));
  }
  return image;
}

std::vector<std::uint64_t> SwapSpace::checksums(std::size_t extent) const {
  std::vector<std::uint64_t> found;
  for (const Seal& seal : seals(extent)) {
    expects(seal.written, "swap space: the extent was not written");
    found.push_back(seal.checksum);
  }
  return found;
}

void SwapSpace::restore(std::size_t extent, std::span<const std::uint64_t> checksums,
                        std::uint64_t version) {
  const std::size_t first = stripe_.first_chunk(extent);
  expects(checksums.size() == seals(extent).size(), "swap space: wrong number of checksums");
  for (std::size_t i = 0; i < checksums.size(); ++i) {
    seals_[first + i] = {checksums[i], version, true, true};
  }
}

void SwapSpace::sync() const {
  for (const auto& device : devices_) device->file.sync();
}

std::vector<std::filesystem::path> SwapSpace::link(const SwapNames& names) const {
  std::vector<std::filesystem::path> paths;
  std::error_code ignored;
  try {
    for (std::size_t p = 0; p < devices_.size(); ++p) {
      if (!link_one(p, names, paths)) break;
    }
  } catch (const Error&) {
    for (const auto& path : paths) std::filesystem::remove(path, ignored);
    throw;
  }
  if (paths.size() == devices_.size()) return paths;
  for (const auto& path : paths) std::filesystem::remove(path, ignored);
  return {};
}

bool SwapSpace::link_one(std::size_t number, const SwapNames& names,
                         std::vector<std::filesystem::path>& paths) const {
  const SwapDevice& device = *devices_[number];
  const auto named = [&](const std::filesystem::path& path) {
    std::error_code ignored;
    std::filesystem::remove(path, ignored);
    if (!device.file.link(path)) return false;
    paths.push_back(path);
    return true;
  };
  if (named(names.folder / fmt::format("{}-{}", names.inside, number))) return true;
  if (!named(device.directory / fmt::format("{}-{}", names.elsewhere, number))) return false;
  if (names.record) names.record(device.directory);
  return true;
}

std::span<const SwapSpace::Seal> SwapSpace::seals(std::size_t extent) const {
  const Bytes chunks = (stripe_.extent_bytes(extent) + kChunk - 1) / kChunk;
  return std::span(seals_).subspan(stripe_.first_chunk(extent), chunks);
}

std::span<SwapSpace::Seal> SwapSpace::seals(std::size_t extent, const Segment& segment) {
  const std::size_t first = stripe_.first_chunk(extent) + segment.start / kChunk;
  return std::span(seals_).subspan(first, (segment.bytes + kChunk - 1) / kChunk);
}

}  // namespace ballast::state
