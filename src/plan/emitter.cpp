#include "src/plan/emitter.h"

#include <algorithm>
#include <utility>

namespace ballast::plan {

void add_edge(std::vector<OpId>& edges, const Plan& plan, OpId from, const Operation& to) {
  if (from == kNoOp || ordered_by_stream(plan.operations[from], to)) return;
  if (std::find(edges.begin(), edges.end(), from) == edges.end()) edges.push_back(from);
}

Emitter::Emitter(std::string name, std::size_t buffer_count, std::uint32_t micro_batches)
    : history_(buffer_count) {
  plan_.name = std::move(name);
  plan_.micro_batches = micro_batches;
}

OpId Emitter::emit(Operation operation) {
  const auto id = static_cast<OpId>(plan_.operations.size());
  operation.lane = lane_of(operation.action);
  for (const Use& use : operation.uses) {
    const Boundary& past = history_[use.buffer];
    add_edge(operation.after, plan_, past.last_writer, operation);
    if (!use.writes) continue;
    for (const OpId reader : past.last_readers) add_edge(operation.after, plan_, reader, operation);
  }
  for (const Use& use : operation.uses) {
    Boundary& past = history_[use.buffer];
    past.buffer = use.buffer;
    if (use.writes) {
      if (past.first_writer == kNoOp) past.first_writer = id;
      past.last_writer = id;
      past.last_readers.clear();
    } else {
      if (past.first_writer == kNoOp) past.first_readers.push_back(id);
      past.last_readers.push_back(id);
    }
  }
  plan_.operations.push_back(std::move(operation));
  return id;
}

Plan Emitter::finish() {
  for (Boundary& past : history_) {
    if (past.buffer != kNoBuffer) plan_.boundaries.push_back(std::move(past));
  }
  return std::move(plan_);
}

}  // namespace ballast::plan
