#include "tools/io/content.h"

#include <bit>
#include <cstring>

#include <fmt/format.h>

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
  expects(file < kMostFiles && size <= kLargestFile && size % kPage == 0,
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

}  // namespace ballast::tools
