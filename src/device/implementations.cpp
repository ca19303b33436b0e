#include "src/device/implementations.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cctype>
#include <climits>
#include <cstdint>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include <fmt/format.h>
#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "ballast/core/error.h"
#include "ballast/core/machine.h"

namespace ballast::device {

DeviceBytes DeviceMemory::take(Bytes bytes, std::string_view what) {
  const std::scoped_lock lock(mutex_);
  const Bytes size = round_up(bytes, kPage);
  const Bytes left = budget_ - bump_.used();
  if (size > left) {
    throw Error(ErrorCategory::memory,
                fmt::format("device memory: {} needs {}, but {} of the budget of {} are left; "
                            "raise ballast.device_bytes",
                            what, format_bytes(size), format_bytes(left), format_bytes(budget_)));
  }
  return {bump_.take<std::byte>(size, kPage), bytes};
}

Bytes DeviceMemory::taken() const {
  const std::scoped_lock lock(mutex_);
  return bump_.used();
}

namespace {

/// MADV_POPULATE_WRITE, which headers before Linux 5.14 lack. Source: Linux,
/// include/uapi/asm-generic/mman-common.h.
constexpr int kPopulateWrite = 23;
/// Bytes that a thread populates at a time, aligned so that no two threads make the same huge page.
constexpr Bytes kPiece = 32 * kMiB;
/// More threads are hardly faster, because memory bandwidth is saturated.
constexpr unsigned kMaxThreads = 16;

/// The largest number of nodes that a kernel can be configured for.
constexpr std::size_t kNodes = 1024;
constexpr std::size_t kWordBits = sizeof(unsigned long) * CHAR_BIT;

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
      std::min<std::size_t>({static_cast<std::size_t>(usable_cpus()), kMaxThreads, pieces});
  std::vector<std::jthread> others;
  for (std::size_t i = 1; i < threads; ++i) others.emplace_back(work);
  work();
}

int numa_node_of(std::string_view address, const std::filesystem::path& devices) {
  std::string name(address);
  std::transform(name.begin(), name.end(), name.begin(),
                 [](unsigned char digit) { return static_cast<char>(std::tolower(digit)); });
  std::ifstream file(devices / name / "numa_node");
  int node = -1;
  return file >> node ? node : -1;
}

bool prefer_numa_node(HostBytes memory, int node) {
  if (node < 0 || static_cast<std::size_t>(node) >= kNodes) return false;
  std::array<unsigned long, kNodes / kWordBits> nodes = {};
  const auto bit = static_cast<std::size_t>(node);
  nodes[bit / kWordBits] = 1UL << (bit % kWordBits);
  // The kernel uses one bit fewer than this argument.
  return syscall(SYS_mbind, memory.data(), memory.size(), MPOL_PREFERRED, nodes.data(), kNodes + 1,
                 0) == 0;
}

}  // namespace ballast::device
