#include <algorithm>
#include <utility>

#include "ballast/schedule/plan.h"

namespace ballast::schedule {
namespace {

class SeamMaker {
 public:
  SeamMaker(const Plan& before, const Plan& next)
      : before_(before), next_(next), edges_(next.operations.size()) {}

  void join(const Boundary& past, const Boundary& future) {
    for (const OpId reader : future.first_readers) add(reader, past.last_writer);
    if (future.first_writer == kNoOp) return;
    add(future.first_writer, past.last_writer);
    for (const OpId reader : past.last_readers) add(future.first_writer, reader);
  }

  std::vector<std::vector<OpId>> take() { return std::move(edges_); }

 private:
  void add(OpId to, OpId from) {
    if (from == kNoOp || ordered_by_stream(before_.operations[from], next_.operations[to])) return;
    std::vector<OpId>& edges = edges_[to];
    if (std::find(edges.begin(), edges.end(), from) == edges.end()) edges.push_back(from);
  }

  const Plan& before_;
  const Plan& next_;
  std::vector<std::vector<OpId>> edges_;
};

}  // namespace

std::vector<std::vector<OpId>> seam(const Plan& before, const Plan& next) {
  SeamMaker maker(before, next);
  auto past = before.boundaries.begin();
  for (const Boundary& future : next.boundaries) {
    past = std::find_if(past, before.boundaries.end(),
                        [&](const Boundary& b) { return b.buffer >= future.buffer; });
    if (past == before.boundaries.end()) break;
    if (past->buffer == future.buffer) maker.join(*past, future);
  }
  return maker.take();
}

}  // namespace ballast::schedule
