#include "ballast/state/swap_plan.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <numeric>
#include <string>
#include <utility>

#include <fmt/format.h>

#include "ballast/aio/file.h"
#include "ballast/core/error.h"
#include "ballast/core/memory.h"
#include "ballast/core/random.h"

namespace ballast::state {

Stripe::Stripe(std::span<const Bytes> extents, std::span<const double> weights, Bytes segment_bytes)
    : weights_(weights.begin(), weights.end()),
      segment_bytes_(segment_bytes),
      file_bytes_(weights.size(), 0) {
  expects(!weights.empty(), "stripe: at least 1 path is needed");
  for (const double weight : weights) {
    expects(weight > 0.0 && std::isfinite(weight), "stripe: weights must be finite and above 0");
  }
  const Bytes segment = round_up(std::max<Bytes>(segment_bytes, 1), kChunk);
  const auto load_with_another = [&](std::size_t path) {
    return static_cast<double>(file_bytes_[path] + segment) / weights[path];
  };
  for (const Bytes asked : extents) {
    Extent extent{
        .bytes = round_up(asked, kPage), .first_chunk = chunks_, .first_segment = segments_.size()};
    for (Bytes start = 0; start < extent.bytes; start += segment) {
      std::size_t path = 0;
      for (std::size_t p = 1; p < weights.size(); ++p) {
        if (load_with_another(p) < load_with_another(path)) path = p;
      }
      const Bytes bytes = std::min(segment, extent.bytes - start);
      segments_.push_back({path, file_bytes_[path], start, bytes});
      file_bytes_[path] += bytes;
      ++extent.segments;
    }
    chunks_ += (extent.bytes + kChunk - 1) / kChunk;
    extents_.push_back(extent);
  }
}

std::span<const Segment> Stripe::segments(std::size_t extent) const {
  const Extent& found = extents_.at(extent);
  return std::span(segments_).subspan(found.first_segment, found.segments);
}

std::size_t Stripe::first_chunk(std::size_t extent) const {
  return extents_.at(extent).first_chunk;
}

Bytes Stripe::bytes() const {
  return std::accumulate(file_bytes_.begin(), file_bytes_.end(), Bytes{0});
}

namespace {

/// Maximum bytes written and read to measure a path.
constexpr Bytes kTrial = 64 * kMiB;

/// Throws the Error of aio::File::create_anonymous, with `path` even if the directory does not
/// exist yet.
void check(const SwapPath& path, Bytes size, aio::File::Access access) {
  const auto place = path.existing();
  try {
    aio::File::check_anonymous(place, size, access);
  } catch (const Error& error) {
    if (place == path.directory) throw;
    throw error.with_context(path.directory.string());
  }
}

/// Fills `memory` with bytes that no drive can compress.
void fill(HostBytes memory) {
  auto* words = reinterpret_cast<std::uint64_t*>(memory.data());
  for (std::size_t i = 0; i < memory.size() / sizeof(std::uint64_t); ++i) {
    words[i] = random_u64(1, i);
  }
}

/// Seconds for one request over all of `file`.
double time_transfer(aio::Queue& queue, aio::Direction direction, const aio::File& file,
                     HostBytes memory) {
  const auto start = std::chrono::steady_clock::now();
  const aio::Ticket ticket =
      queue.submit({.direction = direction, .file = &file, .offset = 0, .memory = memory});
  queue.wait(ticket).check("measuring the bandwidth");
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void measure(SwapPath& path, aio::File::Access access, HostBytes memory) {
  constexpr double kGiga = 1e9;
  const aio::File file = aio::File::create_anonymous(path.existing(), memory.size(), access);
  const auto queue = aio::make_queue(path.io);
  const auto rate = [&](aio::Direction direction) {
    const double seconds = std::max(time_transfer(*queue, direction, file, memory), 1e-9);
    return static_cast<double>(memory.size()) / seconds / kGiga;
  };
  // The first pass allocates the blocks; runs only overwrite them.
  static_cast<void>(rate(aio::Direction::write));
  const double write = rate(aio::Direction::write);
  const double read = rate(aio::Direction::read);
  if (path.write_gbps <= 0.0) path.write_gbps = write;
  if (path.read_gbps <= 0.0) path.read_gbps = read;
}

void measure_unknown(SwapOptions& options, Bytes total) {
  const auto unknown = [](const SwapPath& path) {
    return path.read_gbps <= 0.0 || path.write_gbps <= 0.0;
  };
  if (options.paths.size() < 2) return;
  if (std::none_of(options.paths.begin(), options.paths.end(), unknown)) return;
  const Mapping memory(std::clamp(round_up(total, kPage), kChunk, kTrial), "measuring swap paths");
  fill(memory.bytes());
  std::string line;
  for (SwapPath& path : options.paths) {
    if (unknown(path)) measure(path, options.access, memory.bytes());
    line += fmt::format("{}{} reads {:.2f} and writes {:.2f} GB/s", line.empty() ? "" : "; ",
                        path.directory.string(), path.read_gbps, path.write_gbps);
  }
  log(LogLevel::info, "swap: " + line);
}

/// Every byte is written and read, so the times add up.
double weight(const SwapPath& path) {
  if (path.read_gbps <= 0.0 || path.write_gbps <= 0.0) return 1.0;
  return 2.0 / (1.0 / path.read_gbps + 1.0 / path.write_gbps);
}

bool are_on_one_file_system(const std::filesystem::path& one, const std::filesystem::path& other) {
  return aio::inspect_file_system(one.empty() ? "." : one).device ==
         aio::inspect_file_system(other).device;
}

void require_suited(const SwapPath& path, const SwapOptions& options) {
  const auto place = path.existing();
  const std::string why = aio::unsuited_for_swap(aio::inspect_file_system(place), place);
  if (why.empty() || options.any_file_system) return;
  throw Error(ErrorCategory::io,
              fmt::format("{}; give a directory on a local disk, or set {} to true", why,
                          options.any_file_system_key));
}

/// Bytes that the paths on one file system need together.
struct SpaceNeed {
  std::string paths;
  std::size_t count = 0;
  Bytes bytes = 0;
  aio::FileSystem file_system;
};

std::vector<SpaceNeed> needs(const SwapPlan& plan) {
  std::vector<SpaceNeed> found;
  for (std::size_t p = 0; p < plan.options.paths.size(); ++p) {
    const SwapPath& path = plan.options.paths[p];
    const aio::FileSystem here = aio::inspect_file_system(path.existing());
    auto need = std::find_if(found.begin(), found.end(), [&](const SpaceNeed& other) {
      return other.file_system.device == here.device;
    });
    if (need == found.end()) need = found.insert(found.end(), {.file_system = here});
    need->paths += (need->count == 0 ? "" : " and ") + path.directory.string();
    need->bytes += plan.stripe.file_bytes(p);
    ++need->count;
  }
  return found;
}

void require_space(const SwapPlan& plan) {
  for (const SpaceNeed& need : needs(plan)) {
    if (!need.file_system.free || need.bytes <= *need.file_system.free) continue;
    throw Error(
        ErrorCategory::io,
        fmt::format("{}{}: swapping needs {} ({} bytes), but only {} ({} bytes) are free; free "
                    "some space, give another nvme_path, or keep more in memory",
                    need.paths, need.count > 1 ? " on one file system" : "",
                    format_bytes(need.bytes), need.bytes, format_bytes(*need.file_system.free),
                    *need.file_system.free),
        ENOSPC);
  }
}

}  // namespace

std::filesystem::path SwapPath::existing() const {
  std::filesystem::path place = directory;
  std::error_code ignored;
  while (made_later && place.has_relative_path() && !std::filesystem::exists(place, ignored)) {
    place = place.parent_path();
  }
  return place;
}

std::string SwapPath::file_system() const {
  return aio::inspect_file_system(existing()).type;
}

void check_paths(const SwapOptions& options) {
  for (const SwapPath& path : options.paths) {
    try {
      require_suited(path, options);
      check(path, 0, options.access);
    } catch (const Error& error) {
      if (path.key.empty()) throw;
      throw error.with_context(path.key);
    }
  }
}

SwapPlan plan_swap(SwapOptions options, std::span<const Bytes> extents) {
  expects(!options.paths.empty(), "swap: at least 1 path is needed");
  const Bytes total = std::accumulate(extents.begin(), extents.end(), Bytes{0});
  check_paths(options);
  measure_unknown(options, total);
  std::vector<double> weights;
  Bytes block = 0;
  for (const SwapPath& path : options.paths) {
    weights.push_back(weight(path));
    block = std::max(block, path.io.block_bytes);
  }
  SwapPlan plan{std::move(options), Stripe(extents, weights, block)};
  require_space(plan);
  for (std::size_t p = 0; p < plan.options.paths.size(); ++p) {
    check(plan.options.paths[p], plan.stripe.file_bytes(p), plan.options.access);
  }
  return plan;
}

Bytes swap_bytes_on(const std::filesystem::path& place, const SwapOptions& options,
                    std::span<const Bytes> extents) {
  const auto device = aio::inspect_file_system(place).device;
  for (const SwapPath& path : options.paths) {
    if (aio::inspect_file_system(path.existing()).device != device) return 0;
  }
  return std::accumulate(extents.begin(), extents.end(), Bytes{0});
}

std::optional<SwapPlan> reuse_swap(SwapOptions options, std::span<const Bytes> extents,
                                   const SwapImage& image) {
  const bool begins_with_them =
      image.extents.size() <= extents.size() &&
      std::equal(image.extents.begin(), image.extents.end(), extents.begin()) &&
      !image.extents.empty() && options.paths.size() == image.files.size();
  if (!begins_with_them) return std::nullopt;
  check_paths(options);
  for (std::size_t p = 0; p < options.paths.size(); ++p) {
    if (!are_on_one_file_system(image.files[p].parent_path(), options.paths[p].existing())) {
      return std::nullopt;
    }
  }
  // Additional extents do not move those before them.
  return SwapPlan{std::move(options), Stripe(extents, image.weights, image.segment_bytes),
                  image.files};
}

}  // namespace ballast::state
