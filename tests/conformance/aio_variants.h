#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <deque>
#include <memory>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/core/error.h"

#include "aio/block_queue.h"
#include "aio/faults/faulty_transport.h"
#include "aio/transport.h"
#include "tests/support/aligned_bytes.h"
#include "tests/support/direct_io.h"
#include "tests/support/temp_dir.h"

namespace ballast::aio {

/// Faults that a queue must handle without any effect on its users.
inline constexpr std::string_view kMendable =
    "eintr:every=1:percent=6:seed=1,eagain:every=1:percent=6:seed=2,short:percent=20:seed=3,"
    "short:bytes=5000:percent=10:seed=4,late:percent=30:seed=5,late:reaps=3:percent=20:seed=6,"
    "reorder:percent=20:seed=7";

/// One kind of queue. All kinds give the same guarantees.
struct Variant {
  enum class Registered { nothing, everything, some };

  std::string name;
  std::string backend;
  bool faulty = false;  ///< over a transport with faults that the queue handles
  Registered registered = Registered::nothing;
  bool sqpoll = false;
};

inline void PrintTo(const Variant& variant, std::ostream* out) {
  *out << variant.name;
}

inline std::vector<Variant> bare_variants() {
  using enum Variant::Registered;
  return {{"io_uring", "io_uring"},
          {"threads", "threads"},
          {"io_uring_registered", "io_uring", false, everything},
          {"io_uring_partly_registered", "io_uring", false, some},
          {"io_uring_sqpoll", "io_uring", false, everything, true}};
}

inline std::vector<Variant> all_variants() {
  auto variants = bare_variants();
  variants.push_back({"io_uring_faulty", "io_uring", true});
  variants.push_back({"threads_faulty", "threads", true});
  variants.push_back({"io_uring_registered_faulty", "io_uring", true, Variant::Registered::some});
  return variants;
}

inline std::string name_of(const testing::TestParamInfo<Variant>& info) {
  return info.param.name;
}

/// Makes files and memory, which the variant may register, and queues over them. Make files and
/// memory first, then queues.
class AioQueue : public testing::TestWithParam<Variant> {
 protected:
  using Registered = Variant::Registered;

  void SetUp() override {
    for (const Backend& backend : probe_backends()) {
      if (backend.name == GetParam().backend && !backend.usable) GTEST_SKIP() << backend.reason;
    }
    if (!test::has_direct_io(directory_.path())) {
      GTEST_SKIP() << directory_.path() << " has no direct I/O; set TMPDIR to a place that has";
    }
  }

  /// A file of `size` bytes for direct I/O.
  const File& file(Bytes size) { return keep(File::create_anonymous(directory_.path(), size)); }
  const File& keep(File file) { return files_.emplace_back(std::move(file)); }

  /// Page-aligned memory, zeroed or filled with bytes that depend on `seed`.
  HostBytes memory(std::size_t size) { return memory_.emplace_back(size).view(); }
  HostBytes memory(std::size_t size, std::uint64_t seed) {
    return memory_.emplace_back(size, seed).view();
  }

  /// The queue under test.
  [[nodiscard]] std::unique_ptr<Queue> queue(Bytes block_bytes, unsigned depth) const {
    if (GetParam().faulty) return spoiled_queue(block_bytes, depth, FaultPlan(kMendable));
    return make_queue(options(block_bytes, depth), registration());
  }

  /// A queue whose blocks have the faults of `plan`.
  [[nodiscard]] std::unique_ptr<Queue> spoiled_queue(Bytes block_bytes, unsigned depth,
                                                     FaultyTransport::Plan plan) const {
    return spoiled_queue(options(block_bytes, depth), std::move(plan));
  }
  [[nodiscard]] std::unique_ptr<Queue> spoiled_queue(const QueueOptions& options,
                                                     FaultyTransport::Plan plan) const {
    return std::make_unique<BlockQueue>(GetParam().backend, options, [&](unsigned depth) {
      auto transport = GetParam().backend == "io_uring"
                           ? make_uring_transport(depth, options, registration())
                           : make_thread_transport(depth);
      return std::make_unique<FaultyTransport>(std::move(transport), std::move(plan));
    });
  }

  [[nodiscard]] static QueueOptions options(Bytes block_bytes, unsigned depth) {
    return {.backend = GetParam().backend,
            .block_bytes = block_bytes,
            .depth = depth,
            .sqpoll = GetParam().sqpoll};
  }

  test::TempDir directory_;

 private:
  /// All files and memory, or every other one.
  [[nodiscard]] Registration registration() const {
    Registration registration;
    if (GetParam().registered == Registered::nothing) return registration;
    const std::size_t step = GetParam().registered == Registered::some ? 2 : 1;
    for (std::size_t i = 0; i < files_.size(); i += step) registration.files.push_back(&files_[i]);
    for (std::size_t i = 0; i < memory_.size(); i += step) {
      registration.memory.push_back(memory_[i].view());
    }
    return registration;
  }

  std::deque<File> files_;
  std::deque<test::AlignedBytes> memory_;
};

inline Completion transfer(Queue& queue, Direction direction, const File& file, Bytes offset,
                           HostBytes bytes) {
  return queue.wait(queue.submit({direction, &file, offset, bytes}));
}

inline bool equal(HostBytes a, HostBytes b) {
  return std::ranges::equal(a, b);
}

}  // namespace ballast::aio
