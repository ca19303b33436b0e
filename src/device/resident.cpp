#include "src/device/resident.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include <sys/mman.h>

#include "ballast/core/cpu.h"

namespace ballast::device {
namespace {

/// MADV_POPULATE_WRITE, which headers older than Linux 5.14 do not have. Source: Linux,
/// include/uapi/asm-generic/mman-common.h.
constexpr int kPopulateWrite = 23;
/// What a thread takes at a time. Pieces end at multiples of it, so that no two threads make the
/// same huge page.
constexpr Bytes kPiece = 32 * kMiB;
/// More hardly go faster: by then it is memory that is busy.
constexpr unsigned kMostThreads = 16;

}  // namespace

void make_resident(HostBytes memory) {
  if (memory.empty()) return;
  const auto first = reinterpret_cast<std::uintptr_t>(memory.data());
  const std::uintptr_t end = first + memory.size();
  const std::uintptr_t whole = first / kPiece * kPiece;
  const auto pieces = static_cast<std::size_t>((end - whole + kPiece - 1) / kPiece);
  std::atomic<std::size_t> next = 0;
  const auto work = [&] {
    for (std::size_t i = next++; i < pieces; i = next++) {
      const std::uintptr_t from = std::max(first, whole + i * kPiece);
      const std::uintptr_t to = std::min(end, whole + (i + 1) * kPiece);
      std::byte* const start = memory.data() + (from - first);
      if (madvise(start, to - from, kPopulateWrite) != 0) next = pieces;
    }
  };
  const auto threads =
      std::min<std::size_t>({static_cast<std::size_t>(usable_cpus()), kMostThreads, pieces});
  std::vector<std::jthread> others;
  for (std::size_t i = 1; i < threads; ++i) others.emplace_back(work);
  work();
}

}  // namespace ballast::device
