#include "tests/support/fake_memory.h"

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>

#include <sys/mman.h>
#include <unistd.h>

#include "tests/support/fake_cuda.h"

namespace ballast::test {
namespace {

constexpr std::size_t kPageSize = 4096;
constexpr std::size_t kAlignment = 256;  ///< that of cudaMalloc
constexpr int kPoison = 0xff;
constexpr std::byte kEdge{0xa5};

bool holds(GpuSet gpus, int gpu) {
  return (gpus >> gpu & 1U) != 0;
}

std::size_t to_multiple(std::size_t size, std::size_t of) {
  return (size + of - 1) / of * of;
}

struct Allocation {
  std::size_t size = 0;
  std::byte* mapping = nullptr;  ///< with a page without access at both ends; null for malloc
  std::size_t mapped = 0;
  bool fresh = false;  ///< zero so far, and to be poisoned before the GPU's next work
  int device = 0;

  [[nodiscard]] std::byte* pages() const { return mapping + kPageSize; }
  [[nodiscard]] std::size_t accessible() const { return mapped - 2 * kPageSize; }
  void protect(int protection) const {
    if (mapping != nullptr) mprotect(pages(), accessible(), protection);
  }
};

/// All allocations by address.
class Allocations {
 public:
  std::mutex mutex;
  std::map<std::byte*, Allocation> by_address;
  std::size_t taken = 0;
  /// Items of work that have begun and not ended, by GPU.
  std::map<int, int> working;

  [[nodiscard]] bool works_anywhere() const {
    return std::any_of(working.begin(), working.end(),
                       [](const auto& of) { return of.second > 0; });
  }
};
Allocations& allocations() {
  static auto* const kept = new Allocations;  // memory may be freed after static objects
  return *kept;
}

[[noreturn]] void end_process(const char* what) {
  // Only functions that signal handlers may call.
  const auto write_text = [](const char* text) {
    if (write(STDERR_FILENO, text, std::strlen(text)) < 0) _exit(1);
  };
  write_text("fake CUDA: ");
  write_text(what);
  write_text("\n");
  std::abort();
}

struct sigaction before_ours;

/// Names accesses to device memory that a GPU would not allow.
void on_fault(int signal, siginfo_t* info, void* context) {
  Allocations& all = allocations();
  const auto* const address = static_cast<const std::byte*>(info->si_addr);
  if (all.mutex.try_lock()) {
    for (const auto& [start, allocation] : all.by_address) {
      if (allocation.mapping == nullptr || address < allocation.mapping ||
          address >= allocation.mapping + allocation.mapped) {
        continue;
      }
      const bool guard =
          address < allocation.pages() || address >= allocation.pages() + allocation.accessible();
      end_process(guard                  ? "access beyond an allocation of device memory"
                  : all.works_anywhere() ? "the host or another GPU touches device memory"
                                         : "the host touches device memory");
    }
    all.mutex.unlock();
  }
  if ((before_ours.sa_flags & SA_SIGINFO) != 0 && before_ours.sa_sigaction != nullptr) {
    return before_ours.sa_sigaction(signal, info, context);
  }
  sigaction(signal, &before_ours, nullptr);  // the access repeats, and ends the process
}

void watch_faults() {
  static const bool once = [] {
    struct sigaction ours = {};
    ours.sa_sigaction = on_fault;
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&ours.sa_mask);
    sigaction(SIGSEGV, &ours, &before_ours);
    return true;
  }();
  static_cast<void>(once);
}

/// Maps memory whose last byte is next to a page without access.
Allocation map(std::size_t size) {
  Allocation made = {
      .size = size,
      .mapped = to_multiple(to_multiple(size, kAlignment), kPageSize) + 2 * kPageSize,
      .fresh = true};
  void* const address =
      mmap(nullptr, made.mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (address == MAP_FAILED) return made;
  made.mapping = static_cast<std::byte*>(address);
  // Each item of work opens and closes the memory, which takes time for each page.
  madvise(address, made.mapped, MADV_HUGEPAGE);
  return made;
}

/// The bytes around an allocation that its pages contain.
template <class Do>
void for_edges(std::byte* start, const Allocation& allocation, const Do& call) {
  call(allocation.pages(), start);
  call(start + allocation.size, allocation.pages() + allocation.accessible());
}

void poison(std::byte* start, Allocation& allocation) {
  if (allocation.fresh) std::memset(start, kPoison, allocation.size);
  allocation.fresh = false;
}

void check_edges(std::byte* start, const Allocation& allocation) {
  if (allocation.mapping == nullptr) return;
  allocation.protect(PROT_READ | PROT_WRITE);
  for_edges(start, allocation, [](const std::byte* from, const std::byte* to) {
    for (; from < to; ++from) {
      if (*from != kEdge) end_process("a write beyond an allocation of device memory");
    }
  });
}

}  // namespace

void* FakeMemory::take(std::size_t size, int device) {
  Allocations& all = allocations();
  const std::scoped_lock lock(all.mutex);
  if (FakeCuda::seed == 0) {
    void* const memory = std::calloc(size, 1);
    if (memory == nullptr) return nullptr;
    all.by_address[static_cast<std::byte*>(memory)] = {
        .size = size, .fresh = true, .device = device};
    all.taken += size;
    return memory;
  }
  watch_faults();
  Allocation made = map(size);
  made.device = device;
  if (made.mapping == nullptr) return nullptr;
  std::byte* const start = made.pages() + made.accessible() - to_multiple(size, kAlignment);
  made.protect(PROT_READ | PROT_WRITE);
  for_edges(start, made, [](std::byte* from, std::byte* to) {
    std::memset(from, static_cast<int>(kEdge), static_cast<std::size_t>(to - from));
  });
  if (all.working[device] == 0) made.protect(PROT_NONE);
  all.by_address[start] = made;
  all.taken += size;
  return start;
}

void FakeMemory::give_back(void* memory) {
  if (memory == nullptr) return;
  Allocations& all = allocations();
  const std::scoped_lock lock(all.mutex);
  const auto found = all.by_address.find(static_cast<std::byte*>(memory));
  if (found == all.by_address.end()) end_process("memory is freed that is not an allocation");
  const Allocation allocation = found->second;
  all.taken -= allocation.size;
  check_edges(found->first, allocation);
  all.by_address.erase(found);
  if (allocation.mapping == nullptr) {
    std::free(memory);
  } else {
    munmap(allocation.mapping, allocation.mapped);
  }
}

void FakeMemory::zero(void* memory, std::size_t size) {
  Allocations& all = allocations();
  {
    const std::scoped_lock lock(all.mutex);
    const auto found = all.by_address.find(static_cast<std::byte*>(memory));
    if (found != all.by_address.end() && found->second.size == size && found->second.fresh) {
      found->second.fresh = false;
      return;
    }
  }
  std::memset(memory, 0, size);
}

FakeMemory::Where FakeMemory::where(const void* start, std::size_t size) {
  Allocations& all = allocations();
  const std::scoped_lock lock(all.mutex);
  const auto* const first = static_cast<const std::byte*>(start);
  auto next = all.by_address.upper_bound(const_cast<std::byte*>(first));
  if (next != all.by_address.begin()) {
    const auto& [address, allocation] = *std::prev(next);
    const auto before = static_cast<std::size_t>(first - address);
    if (before < allocation.size) {
      return size <= allocation.size - before ? Where::inside : Where::across;
    }
  }
  if (next != all.by_address.end() && first + size > next->first) return Where::across;
  return Where::outside;
}

void FakeMemory::open(GpuSet gpus, const void* zeroed) {
  if (FakeCuda::seed == 0) return;
  Allocations& all = allocations();
  const std::scoped_lock lock(all.mutex);
  for (auto& [start, allocation] : all.by_address) {
    if (!holds(gpus, allocation.device)) continue;
    if (all.working[allocation.device] == 0) allocation.protect(PROT_READ | PROT_WRITE);
    if (start != zeroed) poison(start, allocation);
  }
  for (int gpu = 0; gpus >> gpu != 0; ++gpu) all.working[gpu] += holds(gpus, gpu) ? 1 : 0;
}
void FakeMemory::close(GpuSet gpus) {
  if (FakeCuda::seed == 0) return;
  Allocations& all = allocations();
  const std::scoped_lock lock(all.mutex);
  for (int gpu = 0; gpus >> gpu != 0; ++gpu) all.working[gpu] -= holds(gpus, gpu) ? 1 : 0;
  for (auto& [start, allocation] : all.by_address) {
    if (all.working[allocation.device] == 0) allocation.protect(PROT_NONE);
  }
}

bool FakeMemory::is_on(int device, const void* start) {
  Allocations& all = allocations();
  const std::scoped_lock lock(all.mutex);
  const auto next = all.by_address.upper_bound(static_cast<std::byte*>(const_cast<void*>(start)));
  return next != all.by_address.begin() && std::prev(next)->second.device == device;
}

std::size_t FakeMemory::taken() {
  Allocations& all = allocations();
  const std::scoped_lock lock(all.mutex);
  return all.taken;
}

}  // namespace ballast::test
