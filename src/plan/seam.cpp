#include <algorithm>
#include <utility>

#include "src/plan/emitter.h"

namespace ballast::plan {

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

}  // namespace ballast::plan
