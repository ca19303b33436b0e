#include <algorithm>

#include "src/plan/emitter.h"

namespace ballast::plan {

std::vector<std::vector<OpId>> seam(const Plan& before, const Plan& next) {
  std::vector<std::vector<OpId>> edges(next.operations.size());
  const auto add = [&](OpId to, OpId from) {
    add_edge(edges[to], before, from, next.operations[to]);
  };
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
  return edges;
}

}  // namespace ballast::plan
