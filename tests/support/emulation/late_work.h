#pragma once

#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <utility>
#include <vector>

#include "tests/support/emulation/grid.h"

namespace ballast::test::emulation {

// Work that a thread has started and that happens later. Only grid.cpp includes it.

/// A copy of 16 bytes that was started.
struct Copy {
  void* to;
  const void* from;
  bool there;
  bool done = false;

  void run() {
    if (done) return;
    done = true;
    if (there) {
      std::memcpy(to, from, 16);
    } else {
      std::memset(to, 0, 16);
    }
  }
};

/// A thread's part of a product of a warpgroup.
struct Product {
  std::function<void()> body;
  std::uint64_t started;
  bool done = false;

  void run(Watcher* watching) {
    if (done) return;
    done = true;
    if (watching != nullptr) watching->begin_reads_of_product(started);
    body();
    if (watching != nullptr) watching->end_reads_of_product();
  }
};

/// Work of a thread in groups: those that it can await, and the open one.
template <class Work>
struct Groups {
  std::deque<std::vector<Work>> ended;
  std::vector<Work> open;

  [[nodiscard]] bool empty() const { return ended.empty() && open.empty(); }
  void end() {
    ended.push_back(std::move(open));
    open.clear();
  }
  /// Calls visit(work) in the order in which the work was started, until it returns false.
  template <class Visit>
  void each(const Visit& visit) {
    for (auto& group : ended) {
      for (Work& work : group) {
        if (!visit(work)) return;
      }
    }
    for (Work& work : open) {
      if (!visit(work)) return;
    }
  }
};

}  // namespace ballast::test::emulation
