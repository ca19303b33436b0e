#include "tests/support/emulation/grid.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include <dlfcn.h>
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define __SANITIZE_ADDRESS__ 1  // as gcc calls it
#endif
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace ballast::test::emulation {
namespace {

constexpr std::size_t kStack = std::size_t{128} << 10U;
constexpr unsigned kLanes = 32;

std::atomic<Order> order_of_threads = Order::forward;
std::atomic<bool> warpgroup_products = false;

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "emulated grid: %s\n", what);
  std::abort();
}

/// Calls the _longjmp() of the C library. The address sanitizer replaces that function, and
/// prepares all calls of functions that do not return, because frames may be left for good. Fibers
/// leave no frame, and these preparations, with their system calls, took three quarters of the
/// time.
void long_jump(jmp_buf& to) {
  using Jump = void (*)(jmp_buf, int);
  static const auto jump = reinterpret_cast<Jump>(dlsym(RTLD_NEXT, "_longjmp"));
  jump(to, 1);
}

enum class State { ready, at_block, at_warp, ended };

struct Copy {
  void* to;
  const void* from;
  bool there;
};

struct Fiber {
  ucontext_t context = {};
  jmp_buf jump = {};
  bool entered = false;
  void* stack = nullptr;
  void* fake_stack = nullptr;  ///< stack of the address sanitizer
  State state = State::ready;
  std::uint32_t mask = 0;
  unsigned turn = 0;  ///< number of exchanges so far
  std::byte given[2][kMostExchanged] = {};
  std::deque<std::vector<Copy>> groups;
  std::vector<Copy> open;
  std::deque<std::vector<std::function<void()>>> products;
  std::vector<std::function<void()>> open_products;

  /// Continues the fiber, which returns through `home`. Contexts save the signal mask with a system
  /// call each time, jumps do not, so a context is used only for the first step onto the stack.
  [[gnu::noinline]] void jump_from(jmp_buf& home) {
    if (_setjmp(home) != 0) return;
    if (entered) long_jump(jump);
    entered = true;
    setcontext(&context);
  }
  [[gnu::noinline]] void jump_to(jmp_buf& home) {
    if (_setjmp(jump) == 0) long_jump(home);
  }
};

/// Runs one block at a time, on the calling thread.
class Block {
 public:
  void run(Dim3 blocks, unsigned threads, std::size_t shared_bytes, Dim3 block,
           const std::function<void()>& body) {
    body_ = &body;
    shared_.assign(shared_bytes + 128, std::byte{0xa5});  // uninitialised memory
    place_ = {.thread = {0, 0, 0}, .block = block, .threads = {threads}, .blocks = blocks};
    prepare(threads);
    std::mt19937 random(block.x + 7919 * block.y + 31337 * block.z);
    while (ended_ < count_) {
      const unsigned warp = choose_warp(random);
      if (warp < warps()) {
        run_lanes(warp, random);
        release_warp(warp * kLanes);
      } else if (!release_block()) {
        fail("threads wait for each other for ever (a barrier that not all of them reach)");
      }
    }
  }

  Fiber& current() { return *fibers_[running_]; }
  [[nodiscard]] unsigned running() const { return running_; }
  Fiber& lane(unsigned number) {
    const unsigned thread = running_ / kLanes * kLanes + number % kLanes;
    if (thread >= count_) fail("an exchange with a lane that is not there");
    return *fibers_[thread];
  }
  [[nodiscard]] const Place& place() const { return place_; }
  void* shared() {
    const auto address = reinterpret_cast<std::uintptr_t>(shared_.data());
    return shared_.data() + (128 - address % 128) % 128;
  }

  void wait(State state) {
    current().state = state;
    leave(current());
  }

 private:
  static void start() { current_block().enter_body(); }
  /// The main function of a fiber: runs one thread after another.
  void enter_body() {
    arrived(nullptr);
    while (true) {
      (*body_)();
      Fiber& mine = current();
      if (!mine.open.empty() || !mine.groups.empty()) fail("copies that nobody waits for");
      if (!mine.open_products.empty() || !mine.products.empty()) {
        fail("products that nobody waits for");
      }
      ++ended_;
      wait(State::ended);
    }
  }

  void prepare(unsigned threads) {
    count_ = threads;
    ended_ = 0;
    while (fibers_.size() < threads) {
      Fiber& fiber = *fibers_.emplace_back(new Fiber);
      fiber.stack =
          mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (fiber.stack == MAP_FAILED) fail("no memory for a stack");
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack;
      fiber.context.uc_stack.ss_size = kStack;
      fiber.context.uc_link = nullptr;
      makecontext(&fiber.context, &Block::start, 0);
    }
    for (unsigned thread = 0; thread < threads; ++thread) {
      Fiber& fiber = *fibers_[thread];
      fiber.state = State::ready;
      fiber.turn = 0;
    }
  }

  [[nodiscard]] unsigned warps() const { return (count_ + kLanes - 1) / kLanes; }
  [[nodiscard]] unsigned end_of(unsigned warp) const {
    return std::min(count_, (warp + 1) * kLanes);
  }
  [[nodiscard]] bool can_go_on(unsigned warp) const {
    for (unsigned thread = warp * kLanes; thread < end_of(warp); ++thread) {
      if (fibers_[thread]->state == State::ready) return true;
    }
    return false;
  }

  /// The first, last or any of the warps that can continue; warps() if none can.
  unsigned choose_warp(std::mt19937& random) {
    const Order order = order_of_threads;
    unsigned chosen = warps();
    unsigned candidates = 0;
    for (unsigned i = 0; i < warps(); ++i) {
      const unsigned warp = order == Order::backward ? warps() - 1 - i : i;
      if (!can_go_on(warp)) continue;
      if (order != Order::shuffled) return warp;
      if (random() % ++candidates == 0) chosen = warp;
    }
    return chosen;
  }

  void run_lanes(unsigned warp, std::mt19937& random) {
    const Order order = order_of_threads;
    std::array<unsigned, kLanes> lanes;
    std::iota(lanes.begin(), lanes.end(), 0U);
    if (order == Order::backward) std::reverse(lanes.begin(), lanes.end());
    if (order == Order::shuffled) std::shuffle(lanes.begin(), lanes.end(), random);
    for (const unsigned lane : lanes) {
      const unsigned thread = warp * kLanes + lane;
      if (thread < count_ && fibers_[thread]->state == State::ready) enter(thread);
    }
  }

  void enter(unsigned thread) {
    running_ = thread;
    place_.thread = {thread, 0, 0};
    Fiber& fiber = *fibers_[thread];
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&fake_stack_, fiber.stack, kStack);
#endif
    fiber.jump_from(home_);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fake_stack_, nullptr, nullptr);
#endif
  }
  void leave(Fiber& fiber) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&fiber.fake_stack, home_stack_, home_size_);
#endif
    fiber.jump_to(home_);
    arrived(fiber.fake_stack);
  }
  void arrived([[maybe_unused]] void* fake_stack) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fake_stack, &home_stack_, &home_size_);
#endif
  }

  /// Releases the threads if all threads of the block have arrived. Returns whether it did.
  bool release_block() {
    unsigned at_block = 0;
    for (unsigned thread = 0; thread < count_; ++thread) {
      if (fibers_[thread]->state == State::at_block) ++at_block;
    }
    if (at_block == 0 || at_block + ended_ < count_) return false;
    for (unsigned thread = 0; thread < count_; ++thread) {
      if (fibers_[thread]->state == State::at_block) fibers_[thread]->state = State::ready;
    }
    return true;
  }

  /// Releases lanes whose exchange is complete.
  void release_warp(unsigned first) {
    const unsigned lanes = std::min(kLanes, count_ - first);
    for (unsigned lane = 0; lane < lanes; ++lane) {
      const Fiber& fiber = *fibers_[first + lane];
      if (fiber.state != State::at_warp || !all_there(first, lanes, fiber)) continue;
      const std::uint32_t mask = fiber.mask;
      for (unsigned other = 0; other < lanes; ++other) {
        if ((mask >> other & 1U) != 0) fibers_[first + other]->state = State::ready;
      }
    }
  }

  bool all_there(unsigned first, unsigned lanes, const Fiber& one) const {
    for (unsigned lane = 0; lane < lanes; ++lane) {
      if ((one.mask >> lane & 1U) == 0) continue;
      const Fiber& fiber = *fibers_[first + lane];
      if (fiber.state != State::at_warp) return false;
      if (fiber.mask != one.mask) fail("lanes of a warp meet with different masks");
      if (fiber.turn != one.turn) fail("lanes of a warp are at different exchanges");
    }
    return true;
  }

  static Block& current_block();
  friend Block& block();

  const std::function<void()>* body_ = nullptr;
  std::vector<std::byte> shared_;
  Place place_;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  jmp_buf home_ = {};
  void* fake_stack_ = nullptr;
  const void* home_stack_ = nullptr;
  std::size_t home_size_ = 0;
  unsigned count_ = 0;
  unsigned ended_ = 0;
  unsigned running_ = 0;
};

Block& block() {
  thread_local Block one;
  return one;
}
Block& Block::current_block() {
  return block();
}

}  // namespace

void set_order(Order order) {
  order_of_threads = order;
}

void run_grid(Dim3 blocks, unsigned threads, std::size_t shared_bytes,
              const std::function<void()>& body) {
  if (threads == 0 || threads > 1024) fail("a block has 1 to 1024 threads");
  std::vector<std::size_t> turns(std::size_t{blocks.x} * blocks.y * blocks.z);
  std::iota(turns.begin(), turns.end(), std::size_t{0});
  const Order order = order_of_threads;
  if (order == Order::backward) std::reverse(turns.begin(), turns.end());
  if (order == Order::shuffled) std::shuffle(turns.begin(), turns.end(), std::mt19937(17));
  for (const std::size_t turn : turns) {
    const std::size_t row = turn / blocks.x;
    block().run(blocks, threads, shared_bytes,
                {static_cast<unsigned>(turn % blocks.x), static_cast<unsigned>(row % blocks.y),
                 static_cast<unsigned>(row / blocks.y)},
                body);
  }
}

const Place& here() {
  return block().place();
}
void* dynamic_memory() {
  return block().shared();
}
void meet_block() {
  block().wait(State::at_block);
}

void exchange_all(std::uint32_t mask, const void* mine, std::size_t bytes) {
  Fiber& fiber = block().current();
  if (bytes > 0) std::memcpy(fiber.given[fiber.turn % 2], mine, bytes);
  if ((mask >> (block().running() % kLanes) & 1U) == 0) fail("a lane that its own mask leaves out");
  fiber.mask = mask;
  ++fiber.turn;
  block().wait(State::at_warp);
}
const void* given_by(unsigned lane) {
  const unsigned turn = block().current().turn - 1;
  return block().lane(lane).given[turn % 2];
}

void start_copy(void* to, const void* from, bool there) {
  const auto low =
      (reinterpret_cast<std::uintptr_t>(to) | reinterpret_cast<std::uintptr_t>(from)) % 16;
  if (low != 0) fail("a copy of 16 bytes that are not aligned to 16");
  block().current().open.push_back({to, from, there});
}
void end_copies() {
  Fiber& fiber = block().current();
  fiber.groups.push_back(std::move(fiber.open));
  fiber.open.clear();
}
void await_copies(std::size_t pending) {
  Fiber& fiber = block().current();
  while (fiber.groups.size() > pending) {
    for (const Copy& copy : fiber.groups.front()) {
      if (copy.there) {
        std::memcpy(copy.to, copy.from, 16);
      } else {
        std::memset(copy.to, 0, 16);
      }
    }
    fiber.groups.pop_front();
  }
}

bool has_warpgroup_products() {
  return warpgroup_products;
}
void set_warpgroup_products(bool has) {
  warpgroup_products = has;
}
void start_product(std::function<void()> product) {
  block().current().open_products.push_back(std::move(product));
}
void end_products() {
  Fiber& fiber = block().current();
  fiber.products.push_back(std::move(fiber.open_products));
  fiber.open_products.clear();
}
void await_products(std::size_t pending) {
  Fiber& fiber = block().current();
  for (; fiber.products.size() > pending; fiber.products.pop_front()) {
    for (const auto& product : fiber.products.front()) product();
  }
}

}  // namespace ballast::test::emulation
