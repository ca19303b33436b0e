#include "tests/support/emulation/races.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <new>
#include <string>
#include <unordered_map>
#include <utility>

#include <link.h>

#include "tests/support/emulation/grid.h"

namespace ballast::test::emulation {
namespace {

constexpr unsigned kLanes = 32;
constexpr unsigned kMaxThreads = 1024;

/// Who accessed a byte and when, in 64 bits; 0: nobody. The time of a thread is the number of
/// barriers of its block so far, and the number of its __syncwarp() since the last of them.
struct Event {
  std::uint64_t bits = 0;

  friend bool operator==(const Event&, const Event&) = default;

  static constexpr unsigned kMeetings = 10;
  static constexpr unsigned kBarriers = 16;
  static constexpr unsigned kThreads = 10;
  static constexpr unsigned kRuns = 26;

  static Event of(unsigned kind, std::uint64_t run, unsigned thread, unsigned barrier,
                  unsigned meeting) {
    Event event;
    event.bits = kind;
    event.bits = event.bits << kRuns | run;
    event.bits = event.bits << kThreads | thread;
    event.bits = event.bits << kBarriers | barrier;
    event.bits = event.bits << kMeetings | meeting;
    return event;
  }
  [[nodiscard]] unsigned meeting() const { return field(0, kMeetings); }
  [[nodiscard]] unsigned barrier() const { return field(kMeetings, kBarriers); }
  [[nodiscard]] unsigned thread() const { return field(kMeetings + kBarriers, kThreads); }
  [[nodiscard]] unsigned run() const { return field(kMeetings + kBarriers + kThreads, kRuns); }
  [[nodiscard]] unsigned kind() const { return field(kMeetings + kBarriers + kThreads + kRuns, 2); }
  [[nodiscard]] unsigned warp() const { return thread() / kLanes; }

 private:
  [[nodiscard]] unsigned field(unsigned shift, unsigned size) const {
    return static_cast<unsigned>(bits >> shift & ((std::uint64_t{1} << size) - 1));
  }
};

/// Kinds of writes.
constexpr unsigned kPlain = 0;
constexpr unsigned kAtomic = 1;
constexpr unsigned kCopying = 2;  ///< an asynchronous copy that is not awaited
/// Kinds of reads since the last write: by one thread; by lanes of a warp, with the latest of their
/// times; by several warps since the last barrier; by several blocks.
constexpr unsigned kByThread = 0;
constexpr unsigned kByWarp = 1;
constexpr unsigned kByBlock = 2;
constexpr unsigned kByGrid = 3;

/// The accesses of one byte.
struct Cell {
  Event written;
  Event read;

  friend bool operator==(const Cell&, const Cell&) = default;
};
constexpr std::size_t kPage = 4096;
using Page = std::array<Cell, kPage>;

struct Range {
  std::uintptr_t begin = 0;
  std::uintptr_t end = 0;

  static Range of(const void* start, std::size_t bytes) {
    const auto begin = reinterpret_cast<std::uintptr_t>(start);
    return {begin, begin + bytes};
  }
  [[nodiscard]] bool has(std::uintptr_t at) const { return at >= begin && at < end; }
};

/// Memory of the calling thread's thread_local variables of the program, which include the static
/// shared memory of kernels.
Range thread_locals() {
  Range range;
  dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* found) {
        for (unsigned i = 0; i < info->dlpi_phnum; ++i) {
          const ElfW(Phdr)& segment = info->dlpi_phdr[i];
          if (segment.p_type == PT_TLS && info->dlpi_tls_data != nullptr) {
            *static_cast<Range*>(found) = Range::of(info->dlpi_tls_data, segment.p_memsz);
          }
        }
        return 1;  // the program comes first
      },
      &range);
  return range;
}

class Races;
/// The object that watches while the calling thread runs a kernel's code, otherwise null.
thread_local Races* watching = nullptr;

/// fail(), which allocates memory that need not be watched.
[[noreturn]] void stop(const std::string& what) {
  watching = nullptr;
  fail(what);
}

/// The races of the grids that one thread of this process runs.
class Races {
 public:
  void begin_grid() {
    first_run_ = run_ + 1;
    static_ = thread_locals();
    place_ = Range::of(&here(), sizeof(Place));
  }
  void begin_block(const void* shared, std::size_t bytes) {
    if (++run_ >> Event::kRuns != 0) stop("too many blocks to watch");
    dynamic_ = Range::of(shared, bytes);
    static_bytes_ = 0;
    barrier_ = 0;
    forget_meetings();
    shown_.fill(0);
  }
  void enter(unsigned thread, const void* stack, std::size_t bytes) {
    thread_ = thread;
    stack_ = Range::of(stack, bytes);
  }
  void met_block() {
    if (++barrier_ >> Event::kBarriers != 0) stop("too many barriers to watch");
    forget_meetings();
  }
  void met_warp(unsigned first, std::uint32_t mask);

  void access(const void* start, std::size_t bytes, bool writes, unsigned kind) {
    const auto begin = reinterpret_cast<std::uintptr_t>(start);
    if (stack_.has(begin) || place_.has(begin)) return;
    const bool shared = dynamic_.has(begin) || static_.has(begin);
    const bool of_kernel = writes && static_.has(begin);
    // Neighbouring bytes mostly have the same accesses.
    Cell before;
    Cell after;
    for (std::uintptr_t at = begin; at < begin + bytes; ++at) {
      Cell& cell = cell_of(at);
      if (of_kernel && cell.written.run() != run_) use_static_byte();
      if (at == begin || cell != before) {
        before = cell;
        if (writes) {
          write(cell, at, shared, kind);
        } else {
          read(cell, at, shared);
        }
        after = cell;
      } else {
        cell = after;
      }
    }
    if (writes && shared) hide_from_products();
  }
  void start_copy(const void* to, const void* from, bool there) {
    access(to, 16, true, kCopying);
    if (there) access(from, 16, false, kPlain);
  }
  /// The copy may have read its source until now.
  void end_copy(const void* to, const void* from, bool there) {
    const auto begin = reinterpret_cast<std::uintptr_t>(to);
    for (std::uintptr_t at = begin; at < begin + 16; ++at) cell_of(at).written = now(kPlain);
    hide_from_products();
    if (there) access(from, 16, false, kPlain);
  }
  void forget(const void* start, std::size_t bytes) {
    const auto begin = reinterpret_cast<std::uintptr_t>(start);
    for (std::uintptr_t at = begin; at < begin + bytes; ++at) cell_of(at) = {};
  }

  [[nodiscard]] std::uint64_t start_product() const { return barrier_; }
  void begin_reads_of_product(std::uint64_t started) {
    in_product_ = true;
    product_start_ = started;
  }
  void end_reads_of_product() { in_product_ = false; }
  /// Products may read the thread's writes before the barrier with the number in shown_.
  void show_to_products() { shown_[thread_] = barrier_ + 1; }

 private:
  [[nodiscard]] Event now(unsigned kind) const {
    return Event::of(kind, run_, thread_, barrier_, meetings_[thread_]);
  }
  void forget_meetings() {
    meetings_.fill(0);
    const unsigned threads = here().threads.x;
    for (unsigned thread = 0; thread < threads; ++thread) known_[thread].fill(0);
  }
  void use_static_byte() {
    if (dynamic_.end - dynamic_.begin + ++static_bytes_ > most_shared_memory()) {
      stop("more shared memory than the GPU has, static memory included");
    }
  }
  void hide_from_products() { shown_[thread_] = std::min(shown_[thread_], barrier_); }

  Cell& cell_of(std::uintptr_t at) {
    const std::uintptr_t number = at / kPage;
    if (number != last_number_ || last_page_ == nullptr) {
      Races* const paused = std::exchange(watching, nullptr);  // this allocates
      auto& page = pages_[number];
      if (page == nullptr) page.reset(static_cast<Page*>(std::calloc(1, sizeof(Page))));
      watching = paused;
      last_number_ = number;
      last_page_ = page.get();
    }
    return (*last_page_)[at % kPage];
  }

  /// Whether an event of this block is ordered before what the running thread does now.
  [[nodiscard]] bool is_before(Event event) const {
    if (event.thread() == thread_ || event.barrier() < barrier_) return true;
    return event.warp() == thread_ / kLanes &&
           event.meeting() < known_[thread_][event.thread() % kLanes];
  }
  /// Like is_before(), for events of any lanes of a warp up to this time.
  [[nodiscard]] bool are_before(Event last) const {
    if (last.barrier() < barrier_) return true;
    if (last.warp() != thread_ / kLanes) return false;
    const auto& known = known_[thread_];
    for (unsigned lane = 0; lane < kLanes; ++lane) {
      if (lane != thread_ % kLanes && known[lane] <= last.meeting()) return false;
    }
    return true;
  }
  /// Whether the event can race with the running thread. Each block has its own shared memory.
  [[nodiscard]] bool matters(Event event, bool shared) const {
    return event.bits != 0 && event.run() >= first_run_ && (!shared || event.run() == run_);
  }

  void check_write_before(const Cell& cell, std::uintptr_t at, bool shared, bool writes,
                          unsigned kind);
  void check_product(const Cell& cell, std::uintptr_t at, bool shared);
  void read(Cell& cell, std::uintptr_t at, bool shared);
  void write(Cell& cell, std::uintptr_t at, bool shared, unsigned kind);
  [[noreturn]] void report(std::uintptr_t at, bool writes, const std::string& other);

  std::uint64_t run_ = 0;  ///< number of blocks so far
  std::uint64_t first_run_ = 1;
  Range dynamic_;
  Range static_;
  Range place_;
  Range stack_;
  std::size_t static_bytes_ = 0;
  unsigned thread_ = 0;
  unsigned barrier_ = 0;
  std::array<unsigned, kMaxThreads> meetings_ = {};
  /// For each thread and lane of its warp, the number of the lane's meeting before which all of the
  /// lane's accesses are ordered before the thread.
  std::array<std::array<unsigned, kLanes>, kMaxThreads> known_ = {};
  std::array<unsigned, kMaxThreads> shown_ = {};
  bool in_product_ = false;
  std::uint64_t product_start_ = 0;

  struct Free {
    void operator()(Page* page) const { std::free(page); }
  };
  std::unordered_map<std::uintptr_t, std::unique_ptr<Page, Free>> pages_;
  std::uintptr_t last_number_ = 0;
  Page* last_page_ = nullptr;
};

void Races::met_warp(unsigned first, std::uint32_t mask) {
  std::array<unsigned, kLanes> together = {};
  for (unsigned lane = 0; lane < kLanes; ++lane) {
    if ((mask >> lane & 1U) == 0) continue;
    if (++meetings_[first + lane] >> Event::kMeetings != 0) stop("too many meetings to watch");
    const auto& known = known_[first + lane];
    for (unsigned i = 0; i < kLanes; ++i) together[i] = std::max(together[i], known[i]);
    together[lane] = std::max(together[lane], meetings_[first + lane]);
  }
  for (unsigned lane = 0; lane < kLanes; ++lane) {
    if ((mask >> lane & 1U) != 0) known_[first + lane] = together;
  }
}

void Races::report(std::uintptr_t at, bool writes, const std::string& other) {
  char where[64];
  if (dynamic_.has(at)) {
    std::snprintf(where, sizeof where, "byte %zu of dynamic shared memory", at - dynamic_.begin);
  } else if (static_.has(at)) {
    std::snprintf(where, sizeof where, "static shared memory");
  } else {
    std::snprintf(where, sizeof where, "global memory at %#zx", at);
  }
  stop(std::string("race: ") + (writes ? "writes " : "reads ") + where + ", which " + other);
}

void Races::check_write_before(const Cell& cell, std::uintptr_t at, bool shared, bool writes,
                               unsigned kind) {
  const Event before = cell.written;
  if (!matters(before, shared)) return;
  if (before.run() != run_) {
    if (kind == kAtomic && before.kind() == kAtomic) return;
    report(at, writes, "another block of the grid has written");
  }
  const std::string other = "thread " + std::to_string(before.thread());
  if (before.kind() == kCopying) {
    report(at, writes, "an asynchronous copy of " + other + " writes that is not awaited");
  }
  if (kind == kAtomic && before.kind() == kAtomic) return;
  if (!is_before(before)) report(at, writes, other + " has written since their last barrier");
}

void Races::check_product(const Cell& cell, std::uintptr_t at, bool shared) {
  const Event before = cell.written;
  if (!shared || !matters(before, shared)) return;
  const std::string other = "thread " + std::to_string(before.thread());
  if (before.kind() == kCopying || before.barrier() >= product_start_) {
    report(at, false, other + " has written after a barrier before the start of the product");
  }
  if (before.barrier() >= shown_[before.thread()]) {
    report(at, false, other + " has written and not shown to products");
  }
}

void Races::read(Cell& cell, std::uintptr_t at, bool shared) {
  if (in_product_) {
    check_product(cell, at, shared);
  } else {
    check_write_before(cell, at, shared, false, kPlain);
  }
  const Event before = cell.read;
  const Event mine = now(kByThread);
  if (before == mine) return;
  if (!matters(before, shared)) {
    cell.read = mine;
  } else if (before.run() != run_) {
    cell.read = now(kByGrid);
  } else if (before.kind() == kByThread || before.kind() == kByWarp) {
    const bool ordered = before.kind() == kByThread ? is_before(before) : are_before(before);
    if (ordered) {
      cell.read = mine;
    } else if (before.warp() == thread_ / kLanes) {
      cell.read = Event::of(kByWarp, run_, thread_, barrier_,
                            std::max(before.meeting(), meetings_[thread_]));
    } else {
      cell.read = now(kByBlock);
    }
  } else if (before.kind() == kByBlock && before.barrier() < barrier_) {
    cell.read = mine;
  }
}

void Races::write(Cell& cell, std::uintptr_t at, bool shared, unsigned kind) {
  check_write_before(cell, at, shared, true, kind);
  const Event before = cell.read;
  if (matters(before, shared)) {
    if (before.kind() == kByGrid || before.run() != run_) {
      report(at, true, "another block of the grid has read");
    }
    if (before.kind() == kByThread && !is_before(before)) {
      report(at, true,
             "thread " + std::to_string(before.thread()) + " has read since their last barrier");
    }
    if ((before.kind() == kByWarp && !are_before(before)) ||
        (before.kind() == kByBlock && before.barrier() == barrier_)) {
      report(at, true,
             "thread " + std::to_string(before.thread()) +
                 " and others have read since their last barrier");
    }
  }
  cell.written = now(kind);
  cell.read = {};
}

Races& races() {
  thread_local Races one;
  return one;
}

class RaceWatcher : public Watcher {
 public:
  void begin_grid() override {
    races().begin_grid();
    watching = &races();
  }
  void end_grid() override { watching = nullptr; }
  void begin_block(const void* shared, std::size_t bytes) override {
    races().begin_block(shared, bytes);
  }
  void enter(unsigned thread, const void* stack, std::size_t bytes) override {
    races().enter(thread, stack, bytes);
  }
  void met_block() override { races().met_block(); }
  void met_warp(unsigned thread, std::uint32_t mask) override { races().met_warp(thread, mask); }
  void start_copy(const void* to, const void* from, bool there) override {
    races().start_copy(to, from, there);
  }
  void end_copy(const void* to, const void* from, bool there) override {
    races().end_copy(to, from, there);
  }
  std::uint64_t start_product() override { return races().start_product(); }
  void begin_reads_of_product(std::uint64_t started) override {
    races().begin_reads_of_product(started);
  }
  void end_reads_of_product() override { races().end_reads_of_product(); }
  void show_to_products() override { races().show_to_products(); }
  void change_atomically(const void* start, std::size_t bytes) override {
    races().access(start, bytes, true, kAtomic);
  }
};

void note(const void* start, std::size_t bytes, bool writes) {
  if (watching != nullptr) watching->access(start, bytes, writes, kPlain);
}

}  // namespace

void watch_races() {
  static RaceWatcher watcher;
  set_watcher(&watcher);
}

}  // namespace ballast::test::emulation

// Memory that a kernel's functions allocate for the emulation may have been another thread's
// before.
void* operator new(std::size_t bytes) {
  void* const memory = std::malloc(bytes);
  if (memory == nullptr) throw std::bad_alloc();
  using ballast::test::emulation::watching;
  if (watching != nullptr) watching->forget(memory, bytes);
  return memory;
}
void operator delete(void* memory) noexcept {
  std::free(memory);
}
void operator delete(void* memory, std::size_t) noexcept {
  std::free(memory);
}

// The calls that compilers insert with -fsanitize=thread.
#define BALLAST_ACCESS(size)                               \
  extern "C" void __tsan_read##size(void* at) {            \
    ballast::test::emulation::note(at, size, false);       \
  }                                                        \
  extern "C" void __tsan_write##size(void* at) {           \
    ballast::test::emulation::note(at, size, true);        \
  }                                                        \
  extern "C" void __tsan_unaligned_read##size(void* at) {  \
    ballast::test::emulation::note(at, size, false);       \
  }                                                        \
  extern "C" void __tsan_unaligned_write##size(void* at) { \
    ballast::test::emulation::note(at, size, true);        \
  }
BALLAST_ACCESS(1)
BALLAST_ACCESS(2)
BALLAST_ACCESS(4)
BALLAST_ACCESS(8)
BALLAST_ACCESS(16)
extern "C" void __tsan_read_range(void* at, std::size_t size) {
  ballast::test::emulation::note(at, size, false);
}
extern "C" void __tsan_write_range(void* at, std::size_t size) {
  ballast::test::emulation::note(at, size, true);
}
extern "C" void __tsan_init() {}
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit() {}
extern "C" void __tsan_vptr_update(void**, void*) {}

// Atomic operations of host code in the same sources.
extern "C" std::uint32_t __tsan_atomic32_load(const volatile std::uint32_t* at, int) {
  return __atomic_load_n(at, __ATOMIC_SEQ_CST);
}
extern "C" std::uint64_t __tsan_atomic64_load(const volatile std::uint64_t* at, int) {
  return __atomic_load_n(at, __ATOMIC_SEQ_CST);
}
extern "C" std::uint32_t __tsan_atomic32_fetch_add(volatile std::uint32_t* at, std::uint32_t by,
                                                   int) {
  return __atomic_fetch_add(at, by, __ATOMIC_SEQ_CST);
}
extern "C" std::uint32_t __tsan_atomic32_fetch_sub(volatile std::uint32_t* at, std::uint32_t by,
                                                   int) {
  return __atomic_fetch_sub(at, by, __ATOMIC_SEQ_CST);
}
