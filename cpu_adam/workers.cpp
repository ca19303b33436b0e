#include "cpu_adam/workers.h"

#include <algorithm>
#include <atomic>
#include <string>

#include <hwloc.h>
#include <oneapi/tbb/blocked_range.h>
#include <oneapi/tbb/global_control.h>
#include <oneapi/tbb/parallel_for.h>
#include <oneapi/tbb/partitioner.h>
#include <oneapi/tbb/task_arena.h>
#include <oneapi/tbb/task_scheduler_observer.h>

#include "ballast/core/error.h"
#include "ballast/core/machine.h"

namespace ballast::cpu_adam {
namespace {

using Bitmap = std::unique_ptr<hwloc_bitmap_s, decltype(&hwloc_bitmap_free)>;

Bitmap make_bitmap() {
  return {hwloc_bitmap_alloc(), &hwloc_bitmap_free};
}

/// The affinity that a thread had before it entered a pinned arena.
Bitmap& saved_affinity() {
  thread_local Bitmap saved = make_bitmap();
  return saved;
}

}  // namespace

/// CPUs and memory of one NUMA node. If the system refuses a binding, only speed is lost.
class Workers::Node {
 public:
  explicit Node(int number) : topology_(nullptr, &hwloc_topology_destroy) {
    hwloc_topology_t topology = nullptr;
    if (hwloc_topology_init(&topology) == 0) topology_.reset(topology);
    if (topology == nullptr || hwloc_topology_load(topology) != 0) {
      throw Error(ErrorCategory::config,
                  "CPU update: cannot read the NUMA topology of this machine");
    }
    const int nodes = hwloc_get_nbobjs_by_type(topology, HWLOC_OBJ_NUMANODE);
    if (number < 0 || number >= nodes) {
      throw Error(ErrorCategory::config,
                  "CPU update: NUMA node " + std::to_string(number) +
                      " does not exist; this machine has " + std::to_string(nodes) +
                      (nodes == 1 ? " node, number 0" : " nodes, numbered from 0"));
    }
    object_ = hwloc_get_obj_by_type(topology, HWLOC_OBJ_NUMANODE, static_cast<unsigned>(number));
  }

  [[nodiscard]] int cpus() const { return std::max(1, hwloc_bitmap_weight(object_->cpuset)); }

  void pin_this_thread() const {
    hwloc_get_cpubind(topology_.get(), saved_affinity().get(), HWLOC_CPUBIND_THREAD);
    hwloc_set_cpubind(topology_.get(), object_->cpuset, HWLOC_CPUBIND_THREAD);
  }
  void restore_this_thread() const {
    hwloc_set_cpubind(topology_.get(), saved_affinity().get(), HWLOC_CPUBIND_THREAD);
  }
  void prefer_memory(HostBytes memory) const {
    hwloc_set_area_membind(topology_.get(), memory.data(), memory.size(), object_->nodeset,
                           HWLOC_MEMBIND_BIND, HWLOC_MEMBIND_BYNODESET);
  }

 private:
  std::unique_ptr<hwloc_topology, decltype(&hwloc_topology_destroy)> topology_;
  hwloc_obj_t object_ = nullptr;
};

struct Workers::Arena {
  class Pinning : public tbb::task_scheduler_observer {
   public:
    Pinning(tbb::task_arena& arena, const Node& node)
        : tbb::task_scheduler_observer(arena), node_(node) {
      observe(true);
    }
    ~Pinning() override { observe(false); }
    Pinning(const Pinning&) = delete;
    Pinning& operator=(const Pinning&) = delete;
    void on_scheduler_entry(bool) override { node_.pin_this_thread(); }
    void on_scheduler_exit(bool) override { node_.restore_this_thread(); }

   private:
    const Node& node_;
  };

  Arena(int threads, const Node* node) : tasks(threads) {
    using Control = tbb::global_control;
    const auto needed = static_cast<std::size_t>(threads);
    if (needed > Control::active_value(Control::max_allowed_parallelism)) {
      limit = std::make_unique<Control>(Control::max_allowed_parallelism, needed);
    }
    tasks.initialize();
    if (node != nullptr) pinning = std::make_unique<Pinning>(tasks, *node);
  }

  /// Set when `threads` is above oneTBB's default limit, which it would enforce with a warning.
  std::unique_ptr<tbb::global_control> limit;
  tbb::task_arena tasks;
  std::unique_ptr<Pinning> pinning;
};

Workers::Workers(int threads, std::optional<int> numa_node) {
  if (threads < 0) {
    throw Error(ErrorCategory::config, "CPU update: " + std::to_string(threads) +
                                           " threads; give 0 (all CPUs) or a positive number");
  }
  if (numa_node) node_ = std::make_unique<Node>(*numa_node);
  threads_ = threads > 0 ? threads : usable_cpus();
  if (threads == 0 && node_) threads_ = std::min(threads_, node_->cpus());
  if (threads_ > 1 || node_) arena_ = std::make_unique<Arena>(threads_, node_.get());
}

Workers::~Workers() = default;

void Workers::for_ranges(Elems count,
                         const std::function<void(Elems first, Elems last)>& range) const {
  const auto run = [&range](Elems first, Elems last) {
    const DefaultFloatingPoint this_thread;
    range(first, last);
  };
  if (count == 0) return;
  if (arena_ == nullptr || (count == 1 && !node_)) return run(0, count);
  // oneTBB orders the ranges after the code above and before the code below. The two atomics repeat
  // that for ThreadSanitizer, which does not see into the library.
  std::atomic<bool> begun{false};
  std::atomic<Elems> done{0};
  const auto ordered = [&](const tbb::blocked_range<Elems>& chunks) {
    if (begun.load(std::memory_order_acquire)) run(chunks.begin(), chunks.end());
    done.fetch_add(chunks.size(), std::memory_order_release);
  };
  begun.store(true, std::memory_order_release);
  arena_->tasks.execute([&] {
    tbb::parallel_for(tbb::blocked_range<Elems>(0, count), ordered, tbb::static_partitioner());
  });
  expects(done.load(std::memory_order_acquire) == count, "CPU update: a chunk was not processed");
}

Mapping Workers::allocate(Bytes bytes) const {
  Mapping mapping(bytes, "CPU update");
  const HostBytes memory = mapping.bytes();
  if (node_ && !memory.empty()) node_->prefer_memory(memory);
  constexpr Bytes kPiece = 2 * kMiB;
  for_ranges((memory.size() + kPiece - 1) / kPiece, [&memory](Elems first, Elems last) {
    const Bytes end = std::min<Bytes>(memory.size(), last * kPiece);
    for (Bytes page = first * kPiece; page < end; page += kPage) memory[page] = std::byte{0};
  });
  return mapping;
}

}  // namespace ballast::cpu_adam
