#pragma once

#include <functional>
#include <memory>

#include <mpi.h>

#include "ballast/comm/launch.h"

#include "src/comm/patience.h"

namespace ballast::comm {

/// MPI in this process, from its start to its end. Thread-safe.
///
/// A collective that was given up leaves a request behind which MPI cannot cancel. From then on
/// patience is at an end: waits in other threads end, nothing new starts and MPI is not ended,
/// because that would wait for the other ranks. The process can still end.
class MpiSession {
 public:
  /// Starts MPI; throws Error(comm) as join_ranks does. The calling thread destroys the session.
  MpiSession(const Launch& launch, std::shared_ptr<Patience> patience);
  /// Ends MPI, unless a collective was given up or an exception is under way.
  ~MpiSession();
  MpiSession(const MpiSession&) = delete;
  MpiSession& operator=(const MpiSession&) = delete;

  /// kPage bytes as one element: counts of it fit an int up to 8 TiB.
  [[nodiscard]] MPI_Datatype page() const { return page_; }

  /// Calls `start`, an MPI_I... call that fills a request and returns a code, and waits for the
  /// request. Throws Error(comm), which says what failed or was not answered, or
  /// Error(interrupted); patience is at an end then.
  void run(const Collective& what, const std::function<int(MPI_Request*)>& start);

  /// All ranks under a context of their own. Collective.
  MPI_Comm duplicate_world();
  /// Ranks with the same `color`, in the order of their `keys`, under a context of their own.
  /// Collective of all ranks.
  MPI_Comm split_world(int color, int key);
  /// Ends what one of these made.
  void release(MPI_Comm& communicator) const;

 private:
  void check_agreement(const Launch& launch) const;
  void wait(const Collective& what, MPI_Request& request);

  std::shared_ptr<Patience> patience_;
  MPI_Datatype page_ = MPI_DATATYPE_NULL;
};

/// `value` as MPI takes counts. Throws Error(comm) when it does not fit.
int to_count(std::uint64_t value);

}  // namespace ballast::comm
