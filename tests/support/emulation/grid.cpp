#include "tests/support/emulation/grid.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <sys/mman.h>

#include "tests/support/emulation/approximate.h"
#include "tests/support/emulation/late_work.h"
#include "tests/support/emulation/stack_switch.h"

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
/// Number of different offsets at which stacks begin, and the distance between two of them. Stacks
/// that all began at multiples of a page would compete for the same lines of the caches.
constexpr std::size_t kColours = 16;
constexpr std::size_t kColourBytes = 256;
constexpr unsigned kLanes = 32;
constexpr unsigned kMaxThreads = 1024;

/// Threads of a warpgroup.
constexpr unsigned kGroup = 4 * kLanes;

std::atomic<Order> order_of_threads = Order::forward;
std::atomic<Watcher*> watcher = nullptr;

enum class State { ready, at_block, at_warp, ended };

struct Fiber {
  Stop stop;
  void* stack = nullptr;
  void* fake_stack = nullptr;  ///< stack of the address sanitizer
  State state = State::ready;
  std::uint32_t mask = 0;
  bool orders_memory = false;  ///< the lanes that meet see each other's writes
  bool vote = false;
  unsigned turn = 0;              ///< number of exchanges so far
  std::uint64_t in_products = 0;  ///< number of calls for products so far
  std::byte given[2][kMaxExchanged] = {};
  Groups<Copy> copies;
  Groups<Product> products;
};

/// Runs one block at a time, on the calling thread.
class Block {
 public:
  void run(Dim3 blocks, unsigned threads, std::size_t shared_bytes, Dim3 block,
           const std::function<void()>& body) {
    body_ = &body;
    shared_.assign(shared_bytes + 128, std::byte{0xa5});  // uninitialised memory
    place_of_thread = {.thread = {0, 0, 0}, .block = block, .threads = {threads}, .blocks = blocks};
    prepare(threads);
    const std::uint64_t seed = seeds().timing;
    timing_ = seed;
    std::mt19937 random(static_cast<unsigned>(block.x + 7919 * block.y + 31337 * block.z + seed));
    if (seed != 0) times_.seed(random());
    watcher_ = watcher;
    if (watcher_ != nullptr) watcher_->begin_block(shared(), shared_bytes);
    while (ended_ < count_) {
      const unsigned warp = choose_warp(random);
      if (warp < warps()) {
        run_lanes(warp, random);
        release_warp(warp * kLanes);
      } else if (!release_block()) {
        fail("threads wait for each other for ever (a barrier that not all of them reach)");
      }
    }
    compare_warpgroups();
  }

  void set_kernel(const void* kernel) { kernel_ = kernel; }
  [[nodiscard]] const void* kernel() const { return kernel_; }
  [[nodiscard]] Watcher* watching() const { return watcher_; }

  Fiber& current() { return *fibers_[running_]; }
  [[nodiscard]] unsigned running() const { return running_; }
  [[nodiscard]] bool has_vote() const {
    return std::any_of(fibers_.begin(), fibers_.begin() + count_,
                       [](const auto& fiber) { return fiber->vote; });
  }
  Fiber& lane(unsigned number) {
    const unsigned thread = running_ / kLanes * kLanes + number % kLanes;
    if (thread >= count_) fail("an exchange with a lane that is not there");
    return *fibers_[thread];
  }
  void* shared() {
    const auto address = reinterpret_cast<std::uintptr_t>(shared_.data());
    return shared_.data() + (128 - address % 128) % 128;
  }

  void wait(State state) {
    current().state = state;
    --ready_[running_ / kLanes];
    if (state == State::at_block) ++at_block_;
    leave(current());
    if (timing_ != 0) run_some(current());
  }

  /// Whether work that may happen now or later happens now.
  bool happens_now() { return timing_ != 0 && times_() % 4 == 0; }
  /// Runs some of a thread's asynchronous work. Copies happen in any order, products in theirs.
  void run_some(Fiber& fiber) {
    if (fiber.copies.empty() && fiber.products.empty()) return;
    fiber.copies.each([this](Copy& copy) {
      if (happens_now()) copy.run();
      return true;
    });
    fiber.products.each([this](Product& product) {
      if (!product.done && !happens_now()) return false;
      product.run(watcher_);
      return true;
    });
  }

  /// Notes that this thread calls an instruction of its warpgroup, all of whose threads must.
  void call_in_warpgroup() {
    if (running_ / kGroup * kGroup + kGroup > count_) {
      fail("a product of a warpgroup that is not whole");
    }
    ++current().in_products;
  }

 private:
  static void start() { current_block().enter_body(); }
  /// The main function of a fiber: runs one thread after another.
  void enter_body() {
    arrived(nullptr);
    while (true) {
      (*body_)();
      Fiber& mine = current();
      if (!mine.copies.empty()) fail("copies that nobody waits for");
      if (!mine.products.empty()) fail("products that nobody waits for");
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
      auto* const stack = static_cast<std::byte*>(fiber.stack);
      const std::size_t colour = (fibers_.size() - 1) % kColours;
      fiber.stop.begin(&Block::start, stack, stack + kStack - colour * kColourBytes);
    }
    at_block_ = 0;
    for (unsigned warp = 0; warp < warps(); ++warp) ready_[warp] = end_of(warp) - warp * kLanes;
    for (unsigned thread = 0; thread < threads; ++thread) {
      Fiber& fiber = *fibers_[thread];
      fiber.state = State::ready;
      fiber.turn = 0;
      fiber.vote = false;
      fiber.in_products = 0;
    }
  }

  void compare_warpgroups() {
    for (unsigned thread = 0; thread < count_; ++thread) {
      if (fibers_[thread]->in_products == fibers_[thread / kGroup * kGroup]->in_products) continue;
      fail("a product of a warpgroup in which threads " + std::to_string(thread / kGroup * kGroup) +
           " and " + std::to_string(thread) + " do not both take part");
    }
  }

  [[nodiscard]] unsigned warps() const { return (count_ + kLanes - 1) / kLanes; }
  [[nodiscard]] unsigned end_of(unsigned warp) const {
    return std::min(count_, (warp + 1) * kLanes);
  }

  /// The first, last or any of the warps that can continue; warps() if none can.
  unsigned choose_warp(std::mt19937& random) {
    const Order order = order_of_threads;
    unsigned chosen = warps();
    unsigned candidates = 0;
    for (unsigned i = 0; i < warps(); ++i) {
      const unsigned warp = order == Order::backward ? warps() - 1 - i : i;
      if (ready_[warp] == 0) continue;
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
    place_of_thread.thread = {thread, 0, 0};
    Fiber& fiber = *fibers_[thread];
    if (watcher_ != nullptr) watcher_->enter(thread, fiber.stack, kStack);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&fake_stack_, fiber.stack, kStack);
#endif
    home_.continue_at(fiber.stop);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fake_stack_, nullptr, nullptr);
#endif
  }
  void leave(Fiber& fiber) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&fiber.fake_stack, home_stack_, home_size_);
#endif
    fiber.stop.continue_at(home_);
    arrived(fiber.fake_stack);
  }
  void arrived([[maybe_unused]] void* fake_stack) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fake_stack, &home_stack_, &home_size_);
#endif
  }

  void make_ready(unsigned thread) {
    fibers_[thread]->state = State::ready;
    ++ready_[thread / kLanes];
  }

  /// Releases the threads if all threads of the block have arrived. Returns whether it did.
  bool release_block() {
    if (at_block_ == 0 || at_block_ + ended_ < count_) return false;
    if (watcher_ != nullptr) watcher_->met_block();
    at_block_ = 0;
    for (unsigned thread = 0; thread < count_; ++thread) {
      if (fibers_[thread]->state == State::at_block) make_ready(thread);
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
      if (watcher_ != nullptr && fiber.orders_memory) watcher_->met_warp(first, mask);
      for (unsigned other = 0; other < lanes; ++other) {
        if ((mask >> other & 1U) != 0) make_ready(first + other);
      }
    }
  }

  bool all_there(unsigned first, unsigned lanes, const Fiber& one) const {
    for (unsigned lane = 0; lane < lanes; ++lane) {
      if ((one.mask >> lane & 1U) == 0) continue;
      const Fiber& fiber = *fibers_[first + lane];
      if (fiber.state == State::ended) {
        fail("lane " + std::to_string(lane) +
             ", which has ended, is in the mask of an exchange or instruction of the warp");
      }
      if (fiber.state != State::at_warp) return false;
      if (fiber.mask != one.mask) fail("lanes of a warp meet with different masks");
      if (fiber.turn != one.turn || fiber.orders_memory != one.orders_memory) {
        fail("lanes of a warp are at different exchanges");
      }
    }
    return true;
  }

  static Block& current_block();

  const void* kernel_ = nullptr;
  Watcher* watcher_ = nullptr;
  std::uint64_t timing_ = 0;
  std::minstd_rand times_;
  const std::function<void()>* body_ = nullptr;
  std::vector<std::byte> shared_;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  Stop home_;
  void* fake_stack_ = nullptr;
  const void* home_stack_ = nullptr;
  std::size_t home_size_ = 0;
  unsigned count_ = 0;
  unsigned ended_ = 0;
  unsigned at_block_ = 0;  ///< threads that wait at a barrier of the block
  unsigned running_ = 0;
  /// Number of threads of each warp that can continue.
  std::array<unsigned, kMaxThreads / kLanes> ready_ = {};
};

/// The block of this host thread, from its first grid on.
constinit thread_local Block* block_of_thread = nullptr;

Block& block() {
  return *block_of_thread;
}
Block& Block::current_block() {
  return block();
}

}  // namespace

void set_order(Order order) {
  order_of_threads = order;
}

void run_grid(const void* kernel, Dim3 blocks, unsigned threads, std::size_t shared_bytes,
              const std::function<void()>& body) {
  thread_local Block one;
  block_of_thread = &one;
  block().set_kernel(kernel);
  if (threads == 0 || threads > kMaxThreads) fail("a block has 1 to 1024 threads");
  std::vector<std::size_t> turns(std::size_t{blocks.x} * blocks.y * blocks.z);
  std::iota(turns.begin(), turns.end(), std::size_t{0});
  const Order order = order_of_threads;
  if (order == Order::backward) std::reverse(turns.begin(), turns.end());
  if (order == Order::shuffled) {
    std::shuffle(turns.begin(), turns.end(),
                 std::mt19937(static_cast<unsigned>(17 + seeds().timing)));
  }
  const InKernel in_kernel;
  Watcher* const watching = watcher;
  if (watching != nullptr) watching->begin_grid();
  for (const std::size_t turn : turns) {
    const std::size_t row = turn / blocks.x;
    block().run(blocks, threads, shared_bytes,
                {static_cast<unsigned>(turn % blocks.x), static_cast<unsigned>(row % blocks.y),
                 static_cast<unsigned>(row / blocks.y)},
                body);
  }
  if (watching != nullptr) watching->end_grid();
}

void fail(const std::string& what) {
  const Place& place = here();
  std::fprintf(stderr, "emulated kernel %s, block (%u, %u, %u), thread %u: %s\n",
               function_name(block_of_thread == nullptr ? nullptr : block().kernel()).c_str(),
               place.block.x, place.block.y, place.block.z, place.thread.x, what.c_str());
  std::abort();
}
void need_capability(unsigned least, const char* what) {
  if (capability() >= least) return;
  fail(std::string(what) + ", which compute capability " + std::to_string(capability() / 10) + "." +
       std::to_string(capability() % 10) + " does not have");
}

void* dynamic_memory() {
  return block().shared();
}
void meet_block() {
  block().wait(State::at_block);
}
bool any_in_block(bool vote) {
  block().current().vote = vote;
  meet_block();
  const bool any = block().has_vote();
  meet_block();  // all threads have counted before the next vote
  block().current().vote = false;
  return any;
}

namespace {
/// Waits for the lanes of `mask`.
void meet_lanes(std::uint32_t mask, bool orders_memory) {
  Fiber& fiber = block().current();
  if ((mask >> (block().running() % kLanes) & 1U) == 0) fail("a lane that its own mask leaves out");
  fiber.mask = mask;
  fiber.orders_memory = orders_memory;
  ++fiber.turn;
  block().wait(State::at_warp);
}
}  // namespace

void meet_warp(std::uint32_t mask) {
  meet_lanes(mask, true);
}
void exchange_all(std::uint32_t mask, const void* mine, std::size_t bytes) {
  Fiber& fiber = block().current();
  if (bytes > 0) std::memcpy(fiber.given[fiber.turn % 2], mine, bytes);
  meet_lanes(mask, false);
}
const void* given_by(unsigned lane) {
  const unsigned turn = block().current().turn - 1;
  return block().lane(lane).given[turn % 2];
}

void start_copy(void* to, const void* from, bool there) {
  need_capability(80, "an asynchronous copy");
  const auto low =
      (reinterpret_cast<std::uintptr_t>(to) | reinterpret_cast<std::uintptr_t>(from)) % 16;
  if (low != 0) fail("a copy of 16 bytes that are not aligned to 16");
  if (auto* const watching = block().watching()) watching->start_copy(to, from, there);
  Copy& copy = block().current().copies.open.emplace_back(Copy{to, from, there});
  if (block().happens_now()) copy.run();
}
void end_copies() {
  block().current().copies.end();
}
void await_copies(std::size_t pending) {
  auto& groups = block().current().copies.ended;
  auto* const watching = block().watching();
  for (; groups.size() > pending; groups.pop_front()) {
    for (Copy& copy : groups.front()) {
      copy.run();
      if (watching != nullptr) watching->end_copy(copy.to, copy.from, copy.there);
    }
  }
}

void start_product(std::function<void()> product) {
  block().call_in_warpgroup();
  auto* const watching = block().watching();
  const std::uint64_t started = watching == nullptr ? 0 : watching->start_product();
  block().current().products.open.push_back({std::move(product), started});
  if (block().happens_now()) block().run_some(block().current());
}
void end_products() {
  block().call_in_warpgroup();
  block().current().products.end();
}
void await_products(std::size_t pending) {
  block().call_in_warpgroup();
  auto* const watching = block().watching();
  auto& groups = block().current().products.ended;
  for (; groups.size() > pending; groups.pop_front()) {
    for (Product& product : groups.front()) product.run(watching);
  }
}
void show_to_products() {
  if (auto* const watching = block().watching()) watching->show_to_products();
}

void set_watcher(Watcher* chosen) {
  watcher = chosen;
}
bool is_watched() {
  return watcher != nullptr;
}
void change_atomically(const void* start, std::size_t bytes) {
  if (auto* const watching = block().watching()) watching->change_atomically(start, bytes);
}

}  // namespace ballast::test::emulation
