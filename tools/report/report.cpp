#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/core/units.h"
#include "ballast/text/files.h"

#include "tools/command_line.h"
#include "tools/commands.h"
#include "tools/ending_notice.h"
#include "tools/process.h"
#include "tools/report/csv.h"
#include "tools/report/page.h"
#include "tools/report/run_data.h"
#include "tools/report/server.h"

namespace ballast::tools {
namespace {

using text::Json;

struct ReportArguments {
  std::vector<std::string> runs;
  std::vector<std::string> traces;
  std::filesystem::path out;
  std::filesystem::path csv;
  bool watch = false;
  std::uint32_t port = 0;
};

std::vector<RunData> read_runs(const ReportArguments& arguments) {
  const std::vector<std::filesystem::path> traces(arguments.traces.begin(), arguments.traces.end());
  std::vector<RunData> runs;
  runs.reserve(arguments.runs.size());
  for (const std::string& run : arguments.runs) runs.emplace_back(run, traces);
  std::set<std::string> names;
  for (const RunData& run : runs) names.insert(run.name());
  for (std::size_t i = 0; names.size() < runs.size() && i < runs.size(); ++i) {
    runs[i].rename(arguments.runs[i]);
  }
  return runs;
}

Json report_data(const std::vector<RunData>& runs, bool live) {
  // A page of any number of runs stays small.
  const std::size_t groups = std::max<std::size_t>(250, 3000 / runs.size());
  Json list = Json::array();
  for (const RunData& run : runs) list.push_back(run.to_json(groups));
  return Json::object({{"kind", "report"},
                       {"live", live},
                       {"runs", list},
                       {"differing", runs.size() > 1 ? differing_keys(runs) : Json::array()}});
}

std::string title_of(const std::vector<RunData>& runs) {
  std::string names;
  for (const RunData& run : runs) names += (names.empty() ? "" : ", ") + run.name();
  return fmt::format("{} {}", runs.size() == 1 ? "Run" : "Runs", names);
}

void watch(std::vector<RunData>& runs, std::uint16_t port) {
  LocalServer server(port);
  fmt::print("report on {} (this machine only); Ctrl-C ends it\n", server.address());
  std::fflush(stdout);
  std::uint64_t changes = 0;
  const auto answer = [&](const std::string& path) -> Reply {
    if (path != "/" && path != "/data.json") {
      return {.status = 404, .type = "text/plain", .body = "not found\n", .tag = ""};
    }
    for (RunData& run : runs) changes += run.update() ? 1 : 0;
    if (path == "/") {
      return {.type = "text/html; charset=utf-8",
              .body = html_page(title_of(runs), report_data(runs, true)),
              .tag = ""};
    }
    return {.type = "application/json",
            .body = report_data(runs, true).compact(),
            .tag = fmt::format("{}", changes)};
  };
  announce_ending(nullptr);  // it ends at once
  server.run(answer, interrupted());
}

void check_options(const ReportArguments& arguments) {
  const bool several = arguments.runs.size() > 1;
  const bool page = !arguments.watch && arguments.csv.empty();
  if (several && page && arguments.out.empty()) {
    throw Error(ErrorCategory::usage, "a report of several runs needs --out FILE");
  }
  for (const auto& [option, given] : {std::pair("--trace", !arguments.traces.empty()),
                                      std::pair("--csv", !arguments.csv.empty())}) {
    if (several && given) {
      throw Error(ErrorCategory::usage,
                  fmt::format("{} is of one run; name only that run", option));
    }
  }
}

/// A file that is there may be somebody's, so it is not replaced.
void write_csv(const RunData& run, const std::filesystem::path& path) {
  std::error_code ignored;
  if (std::filesystem::exists(path, ignored)) {
    throw Error(ErrorCategory::usage, fmt::format("{} exists; choose another file", path.string()));
  }
  text::ReplacedFile file(path);
  file.write(csv_of(run.metrics()));
  file.commit();
  fmt::print("metrics of {} steps in {}\n", run.metrics().rows(), path.string());
}

void run_report(const ReportArguments& arguments) {
  check_options(arguments);
  std::vector<RunData> runs = read_runs(arguments);
  if (!arguments.csv.empty()) {
    write_csv(runs.front(), arguments.csv);
    if (arguments.out.empty()) return;
  }
  if (arguments.watch) return watch(runs, static_cast<std::uint16_t>(arguments.port));
  const std::filesystem::path out =
      arguments.out.empty() ? std::filesystem::path(arguments.runs.front()) / "report.html"
                            : arguments.out;
  check_page_file(out);
  const std::string page = html_page(title_of(runs), report_data(runs, false));
  write_page(out, page);
  fmt::print("report in {} ({})\n", out.string(), format_bytes(page.size()));
}

}  // namespace

void add_report(Command program) {
  auto arguments = std::make_shared<ReportArguments>();
  auto& a = *arguments;
  Command command = program.add_command(
      "report", "Write a page (HTML) with the curves, lanes and memory of runs, to look at");
  command.add_option("RUN", &a.runs, "Run directories, to compare several", {.required = true});
  command.add_option("--out", &a.out,
                     "File of the page (default: report.html in the run directory)");
  command.add_option("--trace", &a.traces,
                     "Timeline to show, measured (train --trace) or predicted (plan --trace); give "
                     "one of each to compare (default: that of the run)",
                     {.single_argument = true});
  command.add_option("--csv", &a.csv, "Write the metrics as a table instead, or with --out too");
  command.add_flag("--watch", &a.watch,
                   "Serve the page to this machine's browsers and update it while runs go on",
                   "--out");
  command.add_option(
      "--port", &a.port, "Port of --watch (default: one that is free)",
      {.range = std::pair(std::uint64_t{1}, std::uint64_t{65535}), .needs = "--watch"});
  command.set_action([arguments] { run_report(*arguments); });
}

}  // namespace ballast::tools
