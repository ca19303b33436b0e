#include "src/plan/ordering.h"

#include <algorithm>
#include <cstdint>
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

std::vector<std::vector<OpId>> seam(const Plan& before, const Plan& next) {
  std::vector<std::vector<OpId>> edges(next.operations.size());
  const auto add = [&](OpId to, OpId from) { edges[to].push_back(from); };
  auto past = before.boundaries.begin();
  for (const Boundary& future : next.boundaries) {
    past = std::find_if(past, before.boundaries.end(),
                        [&](const Boundary& b) { return b.buffer >= future.buffer; });
    if (past == before.boundaries.end()) break;
    if (past->buffer != future.buffer) continue;
    for (const OpId reader : future.first_readers) add(reader, past->last_writer);
    if (future.first_writer == kNoOp) continue;
    add(future.first_writer, past->last_writer);
    for (const OpId reader : past->last_readers) add(future.first_writer, reader);
  }
  EdgeSources sources(before);
  for (OpId to = 0; to < edges.size(); ++to) {
    if (edges[to].empty()) continue;
    for (const OpId from : std::exchange(edges[to], {})) {
      sources.add_edge(edges[to], from, to, next.operations[to]);
    }
  }
  return edges;
}

Turns turns_of(const Plan& plan, const std::function<bool(const Operation&)>& takes_turn) {
  std::vector<std::uint64_t> begins;
  begins.reserve(plan.operations.size());
  std::vector<std::uint64_t> free(lane_count(kMaxDevices), 0);
  Turns turns;
  for (const Operation& operation : plan.operations) {
    std::uint64_t& lane_free = free[lane_number(operation)];
    std::uint64_t begin = lane_free;
    for (const OpId before : operation.after) begin = std::max(begin, begins[before] + 1);
    lane_free = begin + 1;
    const bool taken = takes_turn(operation);
    if (taken) turns.order[operation.device].push_back(static_cast<OpId>(begins.size()));
    turns.taken.push_back(taken);
    begins.push_back(begin);
  }
  for (std::vector<OpId>& order : turns.order) {
    std::stable_sort(order.begin(), order.end(),
                     [&](OpId a, OpId b) { return begins[a] < begins[b]; });
  }
  return turns;
}

}  // namespace ballast::plan
