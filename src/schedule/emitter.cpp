#include "src/schedule/emitter.h"

#include <algorithm>
#include <utility>

namespace ballast::schedule {

Emitter::Emitter(std::string name, std::size_t buffer_count, std::uint32_t micro_batches)
    : history_(buffer_count) {
  plan_.name = std::move(name);
  plan_.micro_batches = micro_batches;
}

void Emitter::add_edge(std::vector<OpId>& edges, OpId from, const Operation& to) const {
  if (from == kNoOp || plan_.operations[from].lane == to.lane) return;
  if (std::find(edges.begin(), edges.end(), from) == edges.end()) edges.push_back(from);
}

OpId Emitter::emit(Operation operation) {
  const auto id = static_cast<OpId>(plan_.operations.size());
  for (const Use& use : operation.uses) {
    const History& past = history_[use.buffer];
    add_edge(operation.after, past.last_writer, operation);
    if (!use.writes) continue;
    for (const OpId reader : past.readers) add_edge(operation.after, reader, operation);
  }
  for (const Use& use : operation.uses) {
    History& past = history_[use.buffer];
    if (use.writes) {
      if (past.first_writer == kNoOp) past.first_writer = id;
      past.last_writer = id;
      past.readers.clear();
    } else {
      if (past.first_writer == kNoOp) past.first_readers.push_back(id);
      past.readers.push_back(id);
    }
  }
  plan_.operations.push_back(std::move(operation));
  return id;
}

Plan Emitter::finish() {
  for (const History& past : history_) {
    if (past.last_writer == kNoOp) continue;
    for (const OpId reader : past.first_readers) {
      Operation& operation = plan_.operations[reader];
      add_edge(operation.after_previous, past.last_writer, operation);
    }
    Operation& writer = plan_.operations[past.first_writer];
    add_edge(writer.after_previous, past.last_writer, writer);
    for (const OpId reader : past.readers) add_edge(writer.after_previous, reader, writer);
  }
  return std::move(plan_);
}

}  // namespace ballast::schedule
