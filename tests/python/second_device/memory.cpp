#include "memory.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <stdexcept>
#include <utility>

#include <c10/util/Exception.h>
#include <sys/mman.h>
#include <unistd.h>

namespace second_device {
namespace {

constexpr std::size_t kSpace = std::size_t{64} << 30;  // of addresses
constexpr std::size_t kAlignment = 512;
constexpr int kPoison = 0xFF;

struct Block {
  std::size_t size = 0;
  StreamId stream = 0;
  std::set<StreamId> others;
  BlockSerial serial = 0;
};

struct Pinned {
  void* address;
  std::size_t bytes;
  bool owned;

  ~Pinned() {
    if (!owned) return;
    std::memset(address, kPoison, bytes);
    munmap(address, bytes);
  }
};

struct Memory {
  std::mutex mutex;
  char* locked = nullptr;  // the mapping whose addresses tensors have
  char* open = nullptr;    // the mapping for kernels
  std::map<std::size_t, Block> blocks;
  std::map<std::size_t, std::size_t> holes;  // offset, size
  std::set<BlockSerial> alive;
  BlockSerial next = 1;
  MemoryStats stats;
  std::map<const char*, std::shared_ptr<Pinned>> pinned;

  Memory() {
    const int file = memfd_create("second_device", MFD_CLOEXEC);
    TORCH_CHECK(file >= 0 && ftruncate(file, static_cast<off_t>(kSpace)) == 0,
                "second device: no memory file: ", std::strerror(errno));
    const auto map = [&](int protection) {
      void* at = mmap(nullptr, kSpace, protection, MAP_SHARED | MAP_NORESERVE, file, 0);
      TORCH_CHECK(at != MAP_FAILED, "second device: no mapping: ", std::strerror(errno));
      return static_cast<char*>(at);
    };
    locked = map(PROT_NONE);
    open = map(PROT_READ | PROT_WRITE);
    close(file);
    holes[0] = kSpace;
    stats.budget = std::size_t{2} << 30;
  }

  std::size_t offset_of(const void* address) const {
    return static_cast<std::size_t>(static_cast<const char*>(address) - locked);
  }

  /// Takes the first range that is large enough. Needs the mutex.
  std::size_t take(std::size_t size) {
    for (auto hole = holes.begin(); hole != holes.end(); ++hole) {
      if (hole->second < size) continue;
      const auto [offset, available] = *hole;
      holes.erase(hole);
      if (available > size) holes[offset + size] = available - size;
      return offset;
    }
    TORCH_CHECK(false, "second device: no range of addresses has ", size, " bytes");
  }

  /// Joins a range with its neighbours. Needs the mutex.
  void give_back(std::size_t offset, std::size_t size) {
    auto after = holes.lower_bound(offset);
    if (after != holes.end() && after->first == offset + size) {
      size += after->second;
      after = holes.erase(after);
    }
    if (after != holes.begin()) {
      const auto before = std::prev(after);
      if (before->first + before->second == offset) {
        before->second += size;
        return;
      }
    }
    holes[offset] = size;
  }
};

// Is never destroyed, since tensors may live until the process ends.
Memory& memory() {
  static auto* one = new Memory;
  return *one;
}

}  // namespace

void* allocate(std::size_t bytes, StreamId stream) {
  if (bytes == 0) return nullptr;
  Memory& m = memory();
  const std::size_t size = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  std::lock_guard lock(m.mutex);
  TORCH_CHECK_WITH(OutOfMemoryError, m.stats.allocated + size <= m.stats.budget,
                   "second device out of memory: ", bytes, " bytes asked for, ", m.stats.allocated,
                   " of ", m.stats.budget, " allocated");
  const std::size_t offset = m.take(size);
  std::memset(m.open + offset, kPoison, size);
  const BlockSerial serial = m.next++;
  m.blocks[offset] = {size, stream, {}, serial};
  m.alive.insert(serial);
  m.stats.allocated += size;
  m.stats.peak = std::max(m.stats.peak, m.stats.allocated);
  ++m.stats.allocations;
  return m.locked + offset;
}

void release(void* address) {
  if (address == nullptr) return;
  Memory& m = memory();
  const std::size_t offset = m.offset_of(address);
  Block block;
  {
    std::lock_guard lock(m.mutex);
    block = std::move(m.blocks.at(offset));
    m.blocks.erase(offset);
    m.stats.allocated -= block.size;
  }
  for (const StreamId other : block.others) second_device::block(block.stream, record(other));
  enqueue(block.stream, Kind::housekeeping, [&m, offset, size = block.size, serial = block.serial] {
    std::lock_guard lock(m.mutex);
    std::memset(m.open + offset, kPoison, size);
    m.alive.erase(serial);
    m.give_back(offset, size);
  });
}

void record_use(const void* address, StreamId stream) {
  Memory& m = memory();
  std::lock_guard lock(m.mutex);
  const auto found = m.blocks.find(m.offset_of(address));
  if (found != m.blocks.end() && found->second.stream != stream)
    found->second.others.insert(stream);
}

bool is_device_address(const void* address) {
  return address != nullptr && memory().offset_of(address) < kSpace;
}

char* kernel_address(const void* address) {
  return memory().open + memory().offset_of(address);
}

BlockSerial block_of(const void* address, std::size_t bytes) {
  Memory& m = memory();
  const std::size_t offset = m.offset_of(address);
  std::lock_guard lock(m.mutex);
  auto after = m.blocks.upper_bound(offset);
  TORCH_CHECK(offset < kSpace && after != m.blocks.begin(),
              "second device: this is not an address of the device, or was freed");
  const auto& [begin, block] = *std::prev(after);
  TORCH_CHECK(offset + bytes <= begin + block.size, "second device: a tensor of ", bytes,
              " bytes is not, or no longer, in allocated memory");
  return block.serial;
}

void expect_alive(BlockSerial serial) {
  Memory& m = memory();
  std::lock_guard lock(m.mutex);
  if (!m.alive.contains(serial))
    throw std::runtime_error(
        "second device: a kernel or copy ran after its memory was freed; its "
        "stream was not ordered before, and record_stream() was not called");
}

void set_budget(std::size_t bytes) {
  std::lock_guard lock(memory().mutex);
  memory().stats.budget = bytes;
}

MemoryStats memory_stats() {
  std::lock_guard lock(memory().mutex);
  return memory().stats;
}

void reset_peak() {
  std::lock_guard lock(memory().mutex);
  memory().stats.peak = memory().stats.allocated;
}

void* allocate_pinned(std::size_t bytes) {
  if (bytes == 0) return nullptr;
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  TORCH_CHECK(at != MAP_FAILED, "second device: no pinned memory: ", std::strerror(errno));
  std::memset(at, kPoison, bytes);
  std::lock_guard lock(memory().mutex);
  memory().pinned[static_cast<char*>(at)] = std::shared_ptr<Pinned>(new Pinned{at, bytes, true});
  return at;
}

void register_pinned(void* address, std::size_t bytes) {
  std::lock_guard lock(memory().mutex);
  memory().pinned[static_cast<char*>(address)] =
      std::shared_ptr<Pinned>(new Pinned{address, bytes, false});
}

void release_pinned(void* address) {
  std::shared_ptr<Pinned> last;  // outlives the lock
  std::lock_guard lock(memory().mutex);
  const auto found = memory().pinned.find(static_cast<char*>(address));
  if (found == memory().pinned.end()) return;
  last = std::move(found->second);
  memory().pinned.erase(found);
}

void unregister_pinned(void* address) {
  release_pinned(address);
}

std::shared_ptr<void> pinned_owner(const void* address) {
  std::lock_guard lock(memory().mutex);
  auto after = memory().pinned.upper_bound(static_cast<const char*>(address));
  if (after == memory().pinned.begin()) return nullptr;
  const auto& [begin, block] = *std::prev(after);
  return static_cast<const char*>(address) < begin + block->bytes ? block : nullptr;
}

}  // namespace second_device
