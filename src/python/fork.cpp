#include "src/python/fork.h"

#include <atomic>

#include <sys/types.h>
#include <unistd.h>

#include "ballast/core/error.h"

namespace ballast::python {
namespace {

/// The process that has the threads; 0 if none.
std::atomic<pid_t> owner = 0;

}  // namespace

void note_threads() {
  refuse_after_fork();
  owner.store(getpid());
}

bool lost_threads() noexcept {
  const pid_t process = owner.load();
  return process != 0 && process != getpid();
}

void refuse_after_fork() {
  if (!lost_threads()) return;
  throw Error(
      ErrorCategory::state,
      "this process was forked after its parent had begun to use Ballast, whose threads are "
      "not in the child; start it with multiprocessing's method 'spawn' or 'forkserver', or "
      "fork before the first use");
}

}  // namespace ballast::python
