#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "ballast/comm/communicator.h"
#include "ballast/core/error.h"

namespace ballast::tools {

/// Runs the program: reads the command line, does its work, prints results and errors. Returns the
/// exit status. Handles signals from then on (install_signal_handlers()). Call once per process.
/// `name`: the words that start the program, for messages and run.json; empty: argv[0].
int main_program(int argc, char** argv, const std::vector<std::string>& name = {});

/// Exit status of the program for an error: 2 for bad usage or config, interrupt_status() for an
/// interrupted program, 1 for everything else.
int status_of(const Error& error);

/// The words that start a run of `launch.world` ranks, before the program's name: "mpirun -n 2 ".
/// "" for one rank. Options of the launcher are unknown.
std::string launching_words(const comm::Launch& launch);

/// Thrown when everything that the program has to say was printed and only the status is left.
struct ReportedFailure {
  int status = 1;
};

/// Prints the error of a rank that cannot join the others, unless a lower rank has reported the
/// same meanwhile and the launcher ends this one.
void report_without_ranks(std::uint32_t rank, const std::string& message);

/// Joins the run of several ranks that `launch` describes and calls `work`. After a
/// comm::JointError, which all ranks throw, rank 0 prints it and all throw ReportedFailure. After
/// any other exception this rank prints it, unless another rank has failed before, and ends the
/// whole run. Throws Error(comm) if it cannot join.
void run_as_rank(const comm::Launch& launch, const comm::JoinOptions& options,
                 const std::function<void(comm::Ranks&)>& work);

}  // namespace ballast::tools
