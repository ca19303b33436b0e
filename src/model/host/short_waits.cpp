#include "src/model/host/short_waits.h"

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdlib>
#include <mutex>
#include <thread>

#include <omp.h>
#include <pthread.h>
#include <unistd.h>

namespace ballast::model::host {
namespace {

/// Makes an OpenMP team and sleeps forever. The team lives as long as its first thread.
void keep_a_team(int threads) {
  omp_set_dynamic(0);
  // The compiler would remove an empty region.
  std::atomic<int> started = 0;
#pragma omp parallel num_threads(threads)
  started.fetch_add(1, std::memory_order_relaxed);
  while (true) pause();
}

void start_sleeping_team(int threads) {
  // These threads must not receive the signals of the process.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread sleeper(keep_a_team, threads);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_setname_np(sleeper.native_handle(), "short waits");
  sleeper.detach();
}

}  // namespace

void keep_waits_short(int team) {
  if (team < 2) return;
  static std::once_flag once;
  std::call_once(once, [team] {
    const bool chosen =
        std::getenv("OMP_WAIT_POLICY") != nullptr || std::getenv("GOMP_SPINCOUNT") != nullptr;
    if (!chosen) start_sleeping_team(std::max(2, omp_get_num_procs() - team + 2));
  });
}

}  // namespace ballast::model::host
