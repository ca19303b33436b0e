#include "tools/io_load/load.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <utility>

#include <fmt/format.h>

#include "ballast/aio/file.h"
#include "ballast/core/error.h"

namespace ballast::tools {

namespace {

constexpr Bytes kWord = sizeof(std::uint64_t);
// Bits of a tag, from the top: 6 for the file, 16 for the pass, 42 for the index of the word.
constexpr unsigned kPassShift = 42;
constexpr unsigned kFileShift = 58;
constexpr std::uint64_t kWordMask = (std::uint64_t{1} << kPassShift) - 1;
constexpr std::uint64_t kPassMask = 0xFFFF;

// The step and the finalizer of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom
// number generators", OOPSLA 2014), and the inverses of its odd multipliers modulo 2^64.
constexpr std::uint64_t kStep = 0x9E3779B97F4A7C15U;
constexpr std::uint64_t kFirst = 0xBF58476D1CE4E5B9U;
constexpr std::uint64_t kSecond = 0x94D049BB133111EBU;
constexpr std::uint64_t kFirstInverse = 0x96DE1B173F119089U;
constexpr std::uint64_t kSecondInverse = 0x319642B2D24D8EC3U;
static_assert(kFirst * kFirstInverse == 1 && kSecond * kSecondInverse == 1);

constexpr std::uint64_t mix(std::uint64_t tag) {
  std::uint64_t z = tag + kStep;
  z = (z ^ (z >> 30)) * kFirst;
  z = (z ^ (z >> 27)) * kSecond;
  return z ^ (z >> 31);
}

constexpr std::uint64_t unshift(std::uint64_t z, unsigned by) {
  std::uint64_t x = z;
  for (unsigned done = by; done < 64; done += by) x = z ^ (x >> by);
  return x;
}

constexpr std::uint64_t unmix(std::uint64_t word) {
  std::uint64_t z = unshift(word, 31) * kSecondInverse;
  z = unshift(z, 27) * kFirstInverse;
  return unshift(z, 30) - kStep;
}
static_assert(unmix(mix(0)) == 0 && unmix(mix(0x123456789ABCDEF0U)) == 0x123456789ABCDEF0U);

std::uint64_t load(const std::byte* at) {
  std::uint64_t word = 0;
  std::memcpy(&word, at, kWord);
  return word;
}

}  // namespace

IoContent::IoContent(unsigned file, Bytes size)
    : file_(file), size_(size), passes_(static_cast<std::size_t>(size / kPage), 0) {
  expects(file < kMaxFiles && size <= kLargestFile && size % kPage == 0,
          "a measured file has whole pages, and its number and size fit a word");
}

std::uint64_t IoContent::tag(Bytes offset) const {
  const std::uint64_t pass = passes_[static_cast<std::size_t>(offset / kPage)];
  return file_ << kFileShift | pass << kPassShift | offset / kWord;
}

void IoContent::fill(HostBytes block, Bytes offset) const {
  for (std::size_t page = 0; page < block.size(); page += kPage) {
    const std::uint64_t first = tag(offset + page);
    std::byte* const out = block.data() + page;
    for (std::uint64_t i = 0; i < kPage / kWord; ++i) {
      const std::uint64_t word = mix(first + i);
      std::memcpy(out + i * kWord, &word, kWord);
    }
  }
}

void IoContent::fill_next(HostBytes block, Bytes offset) {
  for (std::size_t page = 0; page < block.size(); page += kPage) {
    ++passes_[static_cast<std::size_t>((offset + page) / kPage)];
  }
  fill(block, offset);
}

std::string IoContent::mistake(HostBytes block, Bytes offset) const {
  for (std::size_t page = 0; page < block.size(); page += kPage) {
    const std::uint64_t first = tag(offset + page);
    const std::byte* const in = block.data() + page;
    std::uint64_t wrong = 0;
    for (std::uint64_t i = 0; i < kPage / kWord; ++i)
      wrong |= mix(first + i) ^ load(in + i * kWord);
    if (wrong == 0) continue;
    for (std::uint64_t i = 0; i < kPage / kWord; ++i) {
      const std::uint64_t found = load(in + i * kWord);
      if (found != mix(first + i)) return explain(offset + page + i * kWord, found);
    }
  }
  return "";
}

std::string IoContent::explain(Bytes offset, std::uint64_t found) const {
  const std::uint64_t expected_tag = tag(offset / kPage * kPage) + offset % kPage / kWord;
  const std::uint64_t difference = found ^ mix(expected_tag);
  if (std::popcount(difference) == 1) {
    const auto bit = static_cast<unsigned>(std::countr_zero(difference));
    return fmt::format("offset={}: bit {} of this byte is flipped", offset + bit / 8, bit % 8);
  }
  const std::uint64_t found_tag = unmix(found);
  const Bytes origin = (found_tag & kWordMask) * kWord;
  const std::uint64_t pass = found_tag >> kPassShift & kPassMask;
  // Foreign words decode to random offsets below 2^45.
  if (origin < size_) {
    if ((found_tag ^ expected_tag) >> kFileShift != 0) {
      return fmt::format("offset={}: holds data of another file's offset {}", offset, origin);
    }
    if (origin != offset) {
      return fmt::format("offset={}: holds data of offset {}", offset, origin);
    }
    return fmt::format("offset={}: holds data of write {} instead of write {}", offset, pass,
                       expected_tag >> kPassShift & kPassMask);
  }
  return fmt::format("offset={}: holds 0x{:016x} instead of 0x{:016x}", offset, found,
                     mix(expected_tag));
}

std::vector<std::filesystem::path> measured_paths(const std::vector<std::string>& given,
                                                  std::string_view task) {
  if (given.size() > IoContent::kMaxFiles) {
    throw Error(ErrorCategory::usage, fmt::format("{}: --path: got {} folders; give at most {}",
                                                  task, given.size(), IoContent::kMaxFiles));
  }
  std::vector<std::filesystem::path> paths;
  for (const std::string& text : given) {
    auto path = std::filesystem::absolute(text).lexically_normal();
    if (!path.has_filename() && path.has_relative_path()) path = path.parent_path();
    if (std::find(paths.begin(), paths.end(), path) != paths.end()) {
      throw Error(ErrorCategory::usage, fmt::format("{}: --path {} is given twice", task, text));
    }
    static_cast<void>(aio::inspect_file_system(path));
    paths.push_back(std::move(path));
  }
  return paths;
}

std::string describe_path(const std::filesystem::path& path) {
  const aio::FileSystem file_system = aio::inspect_file_system(path);
  const std::string free = file_system.free ? format_bytes(*file_system.free) + " free" : "";
  const std::string against = aio::unsuited_for_swap(file_system, path);
  return fmt::format("{}: {}{}{}{}{}", path.string(), file_system.type, free.empty() ? "" : ", ",
                     free, against.empty() ? "" : "\n  not suited for swapping: ", against);
}

Bytes read_size(const std::string& text, std::string_view option) {
  try {
    return parse_bytes(text);
  } catch (const Error& error) {
    throw error.with_context(option);
  }
}

namespace {

constexpr std::array<std::string_view, 4> kPatterns = {"read", "write", "mixed", "copy"};

}  // namespace

std::string_view to_string(IoPattern pattern) {
  return kPatterns[static_cast<std::size_t>(pattern)];
}

IoPattern parse_io_pattern(const std::string& name) {
  const auto* const found = std::find(kPatterns.begin(), kPatterns.end(), name);
  if (found != kPatterns.end()) return static_cast<IoPattern>(found - kPatterns.begin());
  const std::vector<std::string> names(kPatterns.begin(), kPatterns.end());
  throw Error(ErrorCategory::usage,
              fmt::format("unknown pattern '{}'{}; choose read, write, mixed or copy", name,
                          did_you_mean(name, names)));
}

IoRegion::IoRegion(const std::filesystem::path& directory, unsigned index, Bytes size,
                   aio::File::Access access)
    : file_(aio::File::create_anonymous(directory, round_up(size, kMiB), access)),
      content_(index, file_.size()) {}

IoRegion::IoRegion(aio::File file) : file_(std::move(file)), content_(0, file_.size()) {}

IoRegion IoRegion::placeholder(Bytes size) {
  return IoRegion(aio::File::create_in_memory(round_up(size, kMiB)));
}

double IoResult::gb_per_second() const {
  return seconds > 0.0 ? 1e-9 * static_cast<double>(bytes()) / seconds : 0.0;
}

double IoResult::cpu_seconds_per_gb() const {
  return bytes() > 0 ? cpu_seconds / (1e-9 * static_cast<double>(bytes())) : 0.0;
}

double IoResult::blocks_per_batch() const {
  return batches > 0 ? static_cast<double>(blocks) / static_cast<double>(batches) : 0.0;
}

}  // namespace ballast::tools
