#pragma once

#include <atomic>
#include <functional>

namespace CLI {
class App;
}

namespace ballast::tools {

/// What a chosen subcommand does once its arguments are read.
using Action = std::function<void()>;

/// Each adds a subcommand to `app`; when chosen it sets `action`.
void add_train(CLI::App& app, Action& action);
void add_plan(CLI::App& app, Action& action);
void add_tokenize(CLI::App& app, Action& action);
void add_bench(CLI::App& app, Action& action);
void add_tune(CLI::App& app, Action& action);

/// Subcommands of `ballast bench`.
/// The CPU update against a ceiling that moves the same bytes in the same run, for every variant,
/// instruction set, number of threads and size asked for.
void add_bench_adam(CLI::App& bench, Action& action);
/// Our own kernels for attention on the CUDA device beside cuDNN's.
void add_bench_attention(CLI::App& bench, Action& action);
/// Swap throughput of one or several paths by pattern, block size, depth and backend, from the
/// command line or a job file.
void add_bench_io(CLI::App& bench, Action& action);
/// Copies to and from the device by size, as shares of the plainest copies that the machine has.
void add_bench_link(CLI::App& bench, Action& action);
/// Predictions against steps.
void add_bench_plan(CLI::App& bench, Action& action);
/// Training steps of a model with everything in memory, against the matrix-multiply peak of the
/// same run.
void add_bench_step(CLI::App& bench, Action& action);

/// `ballast --version`: version, devices, communicators, I/O backends, instruction sets.
void print_version();

/// Set by SIGINT and SIGTERM.
const std::atomic<bool>& interrupted();
/// The first of them, 0 before.
int interrupt_signal();

}  // namespace ballast::tools
