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

/// `ballast --version`: version, devices, communicators, I/O backends, instruction sets.
void print_version();

/// Set by SIGINT and SIGTERM.
const std::atomic<bool>& interrupted();
/// The last of them, 0 before.
int interrupt_signal();

}  // namespace ballast::tools
