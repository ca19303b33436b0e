#pragma once

#include <atomic>
#include <functional>

namespace CLI {
class App;
}

namespace ballast::tools {

/// The work of the chosen subcommand.
using Action = std::function<void()>;

/// Each adds a subcommand to `app`; when chosen it sets `action`.
void add_train(CLI::App& app, Action& action);
void add_plan(CLI::App& app, Action& action);
void add_tokenize(CLI::App& app, Action& action);
void add_bench(CLI::App& app, Action& action);
void add_tune(CLI::App& app, Action& action);

// Subcommands of `ballast bench`.
void add_bench_adam(CLI::App& bench, Action& action);
void add_bench_attention(CLI::App& bench, Action& action);
void add_bench_io(CLI::App& bench, Action& action);
void add_bench_link(CLI::App& bench, Action& action);
void add_bench_plan(CLI::App& bench, Action& action);
void add_bench_step(CLI::App& bench, Action& action);

/// `ballast --version`: version, devices, communicators, I/O backends, instruction sets.
void print_version();

/// Set by SIGINT and SIGTERM.
const std::atomic<bool>& interrupted();
/// The first of these signals; 0 before any.
int interrupt_signal();

}  // namespace ballast::tools
