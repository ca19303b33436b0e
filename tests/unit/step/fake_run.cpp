#include "tests/unit/step/fake_run.h"

#include <algorithm>
#include <array>
#include <map>
#include <utility>

#include <fmt/format.h>

#include "src/step/plan_types.h"
#include "tests/support/named_operation.h"
#include "tests/unit/step/random_workload.h"

namespace ballast::step {
namespace {

using Seam = std::vector<std::vector<OpId>>;

/// Mostly short, sometimes long enough for all other operations to overtake.
double random_duration(Dice& dice) {
  const double base = static_cast<double>(dice.pick(1, 1000));
  return dice.pick(0, 9) == 0 ? 20.0 * base : base;
}

/// Whether an operation replaces what a buffer held, rather than adding to it.
bool fills(const named::Operation& op, const named::Use& use) {
  using named::Action;
  using named::Role;
  if (!use.writes) return false;
  switch (op.action) {
    case Action::update_on_host:
    case Action::update_on_device:
    case Action::backward:
    case Action::scan_head:
    case Action::differentiate_head:
      return false;
    case Action::forward:
      if (use.role == Role::row_sums) return false;
      // A tile of the embedding adds its rows to those of the tiles before it.
      if (op.block > 0 && op.buffer(Role::input) == kNoBuffer &&
          op.buffer(Role::rows) == kNoBuffer) {
        return false;
      }
      return use.role != Role::workspace;
    case Action::train_head:
    case Action::end_head:
      return use.role == Role::gradient_flow || (use.role == Role::losses && op.micro == 0);
    case Action::route:
      return use.role != Role::router_totals && use.role != Role::workspace;
    case Action::evaluate_head:
      return use.role == Role::losses && op.micro == 0;
    case Action::gather_weights:
      return op.buffer(Role::weights_source) != kNoBuffer;
    case Action::reduce_gradient:
      return use.role == Role::statistics ||
             (use.role == Role::gradient && op.buffer(Role::gradient_source) != kNoBuffer);
    default:
      return use.role != Role::workspace;
  }
}

/// Whether it is the last that uses the sums over tiles.
bool ends_sums(const named::Operation& op) {
  using named::Action;
  using named::Role;
  return op.action == Action::end_head || op.buffer(Role::output) != kNoBuffer ||
         (op.action == Action::backward && op.buffer(Role::rows) == kNoBuffer);
}

bool passes(const Buffer& buffer) {
  return buffer.kind == Kind::staging || buffer.kind == Kind::gradients ||
         buffer.kind == Kind::accumulators || buffer.kind == Kind::activations ||
         buffer.kind == Kind::intermediates ||
         (buffer.kind == Kind::batch && buffer.tier == Tier::device);
}

struct Lease {
  double taken = 0.0;
  double returned = 0.0;
  std::size_t uses = 0;
  bool open = false;
};

/// Bytes in use on a tier from one time on.
struct Change {
  double when;
  bool takes;
  Bytes bytes;
};

class LeaseBook {
 public:
  explicit LeaseBook(const Schedule& schedule)
      : schedule_(schedule), leases_(schedule.buffers.size()) {
    for (const Buffer& buffer : schedule.buffers) {
      if (!passes(buffer)) held_[static_cast<std::size_t>(buffer.tier)] += buffer.bytes;
    }
    const auto& operations = schedule.steady.operations;
    goes_back_ = std::any_of(operations.begin(), operations.end(), [](const Operation& op) {
      return named::action_of(op) == named::Action::backward;
    });
  }

  void follow(const plan::Span& span) {
    using named::Action;
    using named::Role;
    const named::Operation op(span.operation());
    for (const named::Use& use : op.uses) {
      if (!passes(schedule_.buffers[use.buffer])) continue;
      // The initial fill uses NVMe homes of activations and gradients, but nothing reads them.
      const bool passes_on = use.role == Role::output || use.role == Role::gradient;
      if (span.plan->micro_batches == 0 && passes_on && op.lane == Lane::writeback) continue;
      Lease& lease = leases_[use.buffer];
      if (op.action == Action::train_head && use.role == Role::intermediates) continue;
      // Another part than that of the head.
      if (op.action == Action::route && use.role == Role::losses) continue;
      // The last tile replaces the gradient of the norm, which the others add to; the first
      // micro-batch the sums of a tied tile.
      const bool sums = use.role == Role::row_sums || use.role == Role::output_accumulator ||
                        use.role == Role::router_totals;
      const bool next = sums && use.writes && !lease.open;
      if (next || fills(op, use)) {
        // What may be there already is completed, not replaced, and so are frozen weights.
        const bool joins = joins_frozen(op);
        if (!op.unless && !joins) give_back(use.buffer);
        if (span.start < lease.returned) complain(use.buffer, "is filled while in use");
        lease = {span.start, span.end, 0, true};
      } else {
        if (!lease.open) complain(use.buffer, "is used before it is filled");
        ++lease.uses;
        lease.returned = std::max(lease.returned, span.end);
        if (use.role == Role::row_sums && ends_sums(op)) give_back(use.buffer);
      }
    }
  }

  std::vector<std::string> close() {
    for (BufferId id = 0; id < leases_.size(); ++id) give_back(id);
    for (const Tier tier : kTiers) check_peak(tier);
    return std::move(breaches_);
  }

 private:
  /// Whether trained weights, all of them, follow the frozen ones into the place where both pass.
  [[nodiscard]] bool joins_frozen(const named::Operation& op) const {
    using named::Action;
    using named::Role;
    const BufferId home = schedule_.trained_home[op.block];
    if (home == kNoBuffer || op.offset > 0 || op.use(Role::weights).shard) return false;
    const Action action =
        schedule_.buffers[home].tier == Tier::nvme ? Action::fetch_weights : Action::upload_weights;
    return op.action == action;
  }

  void give_back(BufferId id) {
    Lease& lease = leases_[id];
    if (!lease.open) return;
    // Only a rollback reads the gradient of a speculating block again.
    const Buffer& buffer = schedule_.buffers[id];
    const bool may_be_unread = (buffer.kind == Kind::gradients && buffer.tier == Tier::nvme) ||
                               (!goes_back_ && buffer.name.starts_with("activation gradient"));
    if (lease.uses == 0 && !may_be_unread) complain(id, "is filled in vain");
    lease.open = false;
    auto& changes = changes_[static_cast<std::size_t>(schedule_.buffers[id].tier)];
    changes.push_back({lease.taken, true, schedule_.buffers[id].bytes});
    changes.push_back({lease.returned, false, schedule_.buffers[id].bytes});
  }

  void check_peak(Tier tier) {
    const auto i = static_cast<std::size_t>(tier);
    std::sort(changes_[i].begin(), changes_[i].end(), [](const Change& a, const Change& b) {
      return std::pair{a.when, a.takes} < std::pair{b.when, b.takes};
    });
    Bytes now = held_[i];
    Bytes peak = now;
    for (const Change& change : changes_[i]) {
      now = change.takes ? now + change.bytes : now - change.bytes;
      peak = std::max(peak, now);
    }
    if (peak > schedule_.bytes(tier)) {
      breaches_.push_back(fmt::format("{} bytes in use on the {} tier, {} in the ledger", peak,
                                      to_string(tier), schedule_.bytes(tier)));
    }
  }

  void complain(BufferId id, std::string_view what) {
    breaches_.push_back(fmt::format("'{}' {}", schedule_.buffers[id].name, what));
  }

  const Schedule& schedule_;
  bool goes_back_ = false;     ///< something below the head is trained
  std::vector<Lease> leases_;  ///< by buffer
  std::array<Bytes, 3> held_{};
  std::array<std::vector<Change>, 3> changes_;
  std::vector<std::string> breaches_;
};

}  // namespace

std::vector<plan::Span> fake_spans(const std::vector<const Plan*>& runs, std::uint64_t seed,
                                   bool one_at_a_time) {
  Dice dice(seed);
  std::map<std::pair<const Plan*, const Plan*>, Seam> seams;
  std::vector<plan::Span> spans;
  std::array<double, plan::kLaneCount> lane_free{};
  std::vector<double> ended;         // of the current run
  std::vector<double> ended_before;  // of the run before
  double finished = 0.0;             // the last but one run
  double finished_before = 0.0;      // the run before
  for (std::size_t r = 0; r < runs.size(); ++r) {
    const Plan& plan = *runs[r];
    Seam joins(plan.operations.size());
    if (r > 0) {
      const auto [found, fresh] = seams.try_emplace({runs[r - 1], &plan});
      if (fresh) found->second = plan::seam(*runs[r - 1], plan);
      joins = found->second;
    }
    ended.assign(plan.operations.size(), 0.0);
    double finish = finished_before;
    for (OpId id = 0; id < plan.operations.size(); ++id) {
      const Operation& op = plan.operations[id];
      // Disk requests start in plan order and end in any order.
      double& free = lane_free[static_cast<std::size_t>(op.lane)];
      double start = std::max(free, finished);
      for (const OpId before : op.after) start = std::max(start, ended[before]);
      for (const OpId before : joins[id]) start = std::max(start, ended_before[before]);
      ended[id] = start + random_duration(dice);
      free = one_at_a_time || plan::stream_of(op) ? ended[id] : start;
      finish = std::max(finish, ended[id]);
      spans.push_back({&plan, id, r + 1, start, ended[id]});
    }
    std::swap(ended, ended_before);
    finished = std::exchange(finished_before, finish);
  }
  return spans;
}

std::vector<std::uint64_t> result_of(const Schedule& schedule,
                                     const std::vector<plan::Span>& spans) {
  struct Event {
    double when;
    bool starts;  // ends come before starts at the same time
    std::size_t span;
  };
  std::vector<Event> events;
  events.reserve(2 * spans.size());
  for (std::size_t i = 0; i < spans.size(); ++i) {
    events.push_back({spans[i].start, true, i});
    events.push_back({spans[i].end, false, i});
  }
  std::sort(events.begin(), events.end(), [](const Event& a, const Event& b) {
    return std::pair{a.when, a.starts} < std::pair{b.when, b.starts};
  });
  FakeMachine machine(schedule.buffers.size());
  std::vector<std::uint64_t> read(spans.size());
  for (const Event& event : events) {
    const plan::Span& span = spans[event.span];
    if (event.starts) {
      read[event.span] = machine.read(span.operation(), span.run);
    } else {
      machine.write(span.operation(), read[event.span]);
    }
  }
  return machine.values();
}

std::vector<std::uint64_t> serial_result(const Schedule& schedule,
                                         const std::vector<const Plan*>& runs) {
  FakeMachine machine(schedule.buffers.size());
  std::uint64_t number = 0;
  for (const Plan* plan : runs) {
    ++number;
    for (const Operation& op : plan->operations) machine.perform(op, number);
  }
  return machine.values();
}

std::vector<std::string> find_conflicts(const Schedule& schedule,
                                        const std::vector<plan::Span>& spans) {
  std::vector<std::string> conflicts;
  std::vector<double> written(schedule.buffers.size(), 0.0);
  std::vector<double> used(schedule.buffers.size(), 0.0);
  for (const plan::Span& span : spans) {
    const auto& uses = span.operation().uses;
    for (const Use& use : uses) {
      const double free = use.writes ? used[use.buffer] : written[use.buffer];
      if (span.start >= free) continue;
      conflicts.push_back(fmt::format("run {}, operation {} ({}): '{}' is still in use", span.run,
                                      span.op, to_string(span.operation().action),
                                      schedule.buffers[use.buffer].name));
    }
    for (const Use& use : uses) {
      used[use.buffer] = std::max(used[use.buffer], span.end);
      if (use.writes) written[use.buffer] = std::max(written[use.buffer], span.end);
    }
  }
  return conflicts;
}

std::vector<std::string> find_lease_breaches(const Schedule& schedule,
                                             const std::vector<plan::Span>& spans) {
  LeaseBook book(schedule);
  for (const plan::Span& span : spans) book.follow(span);
  return book.close();
}

}  // namespace ballast::step
