#include <CLI/CLI.hpp>

#include "tools/bench_adam.h"
#include "tools/bench_attention.h"
#include "tools/bench_io.h"
#include "tools/bench_link.h"
#include "tools/bench_plan.h"
#include "tools/bench_step.h"
#include "tools/commands.h"

namespace ballast::tools {

void add_bench(CLI::App& app, Action& action) {
  CLI::App* bench = app.add_subcommand("bench", "Measure this machine");
  bench->require_subcommand(1);
  add_bench_adam(*bench, action);
  add_bench_attention(*bench, action);
  add_bench_io(*bench, action);
  add_bench_link(*bench, action);
  add_bench_plan(*bench, action);
  add_bench_step(*bench, action);
}

}  // namespace ballast::tools
