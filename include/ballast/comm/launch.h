#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace ballast::comm {

/// How this process was started, according to the launcher's environment variables.
struct Launch {
  std::string launcher;          ///< "mpirun (Open MPI)", "mpiexec (PMI)", "srun"; "" without one
  std::uint32_t rank = 0;        ///< among all processes of the run
  std::uint32_t world = 1;       ///< number of processes
  std::uint32_t local_rank = 0;  ///< among the processes on this machine
  std::uint32_t local_world = 1;

  [[nodiscard]] bool first() const { return rank == 0; }
};

/// Reads the environment variables of mpirun (Open MPI, MPICH) and srun without calling MPI.
/// Without a launcher: rank 0 of 1. Throws Error(usage), one line with the variable, for values
/// that contradict each other or are not numbers.
Launch read_launch();

/// A launcher whose processes Ballast cannot join, because MPI does not connect them.
struct OtherLauncher {
  std::string name;       ///< "torchrun, accelerate or deepspeed", "flux", ...
  std::string variables;  ///< by which it was found: "RANK and WORLD_SIZE"
  std::uint32_t rank = 0;
  std::uint32_t world = 1;
};

/// Finds a launcher, other than those of read_launch(), that has started this process as one of
/// several: torchrun and programs like it, flux without PMI, jsrun, horovodrun. Empty if there is
/// none, if it has started one process, or if its variables are no numbers.
std::optional<OtherLauncher> find_other_launcher();

}  // namespace ballast::comm
