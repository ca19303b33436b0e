#include "src/plan/emitter.h"

#include <utility>

namespace ballast::plan {

EdgeSources::EdgeSources(const Plan& plan) {
  sources_.reserve(plan.operations.size());
  for (const Operation& operation : plan.operations) add(operation);
}

void EdgeSources::add(const Operation& operation) {
  sources_.push_back({.stream = stream_of(operation)});
}

void EdgeSources::add_edge(std::vector<OpId>& edges, OpId from, OpId id, const Operation& to) {
  if (from == kNoOp) return;
  Source& source = sources_[from];
  if (source.stream && source.stream == stream_of(to)) return;
  if (std::exchange(source.last, id) != id) edges.push_back(from);
}

Emitter::Emitter(std::string name, std::size_t buffer_count, std::uint32_t micro_batches)
    : history_(buffer_count) {
  plan_.name = std::move(name);
  plan_.micro_batches = micro_batches;
}

OpId Emitter::emit(Operation operation) {
  const auto id = static_cast<OpId>(plan_.operations.size());
  operation.lane = lane_of(operation.action);
  edges_.clear();
  for (const Use& use : operation.uses) {
    const Boundary& past = history_[use.buffer];
    sources_.add_edge(edges_, past.last_writer, id, operation);
    if (!use.writes) continue;
    for (const OpId reader : past.last_readers) sources_.add_edge(edges_, reader, id, operation);
  }
  operation.after = edges_;
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
  sources_.add(operation);
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
