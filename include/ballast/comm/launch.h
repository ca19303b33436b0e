#pragma once

#include <cstdint>
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

}  // namespace ballast::comm
