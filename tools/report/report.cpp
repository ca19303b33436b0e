#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "ballast/comm/agreement.h"
#include "ballast/core/error.h"
#include "ballast/core/units.h"
#include "ballast/text/json.h"
#include "ballast/text/output_file.h"

#include "tools/command_line.h"
#include "tools/console/terminal.h"
#include "tools/report/metrics_log.h"
#include "tools/report/page.h"
#include "tools/report/run_data.h"
#include "tools/signals.h"

namespace ballast::tools {
namespace {

/// The rows as a table (RFC 4180): a line with the names of the columns, such as
/// "lanes.compute.busy_seconds", then one for each step. Numbers read back bit for bit; what is
/// missing is empty, what is not finite "nan".
std::string csv_of(const MetricsLog& log) {
  std::string text = "step";
  std::vector<MetricsLog::Column> columns;
  for (const std::string& key : log.keys()) {
    if (key == "step") continue;
    text += "," + key;
    columns.push_back(log.column(key));
  }
  text += "\n";
  for (std::size_t i = 0; i < log.rows(); ++i) {
    text += std::to_string(log.steps()[i]);
    for (const MetricsLog::Column& column : columns) {
      text += ",";
      if (std::isinf(column[i])) text += "nan";
      if (std::isfinite(column[i])) text += text::Json(column[i]).compact();
    }
    text += "\n";
  }
  return text;
}

using text::Json;

struct ReportArguments {
  std::vector<std::string> runs;
  std::vector<std::string> traces;
  std::filesystem::path out;
  std::filesystem::path csv;
  bool overwrite = false;
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

/// The replies of the server, made again only when a run has changed.
class WatchedRuns {
 public:
  explicit WatchedRuns(std::vector<RunData>& runs) : runs_(runs) {}

  Reply answer(const std::string& path) {
    if (path != "/" && path != "/data.json") {
      return {.status = 404, .type = "text/plain", .body = "not found\n", .tag = ""};
    }
    std::uint64_t changed = 0;
    for (RunData& run : runs_) changed += run.update() ? 1 : 0;
    if (changed > 0) {
      changes_ += changed;
      page_.clear();
      data_.clear();
    }
    if (path == "/") {
      if (page_.empty()) page_ = html_page(title_of(runs_), report_data(runs_, true));
      return {.type = "text/html; charset=utf-8", .body = page_, .tag = ""};
    }
    if (data_.empty()) data_ = report_data(runs_, true).compact();
    return {.type = "application/json", .body = data_, .tag = fmt::format("{}", changes_)};
  }

 private:
  std::vector<RunData>& runs_;
  std::uint64_t changes_ = 0;
  std::string page_;
  std::string data_;
};

/// The command for a browser on another machine. The same address leads here through a tunnel.
std::string tunnel_to(std::uint16_t port) {
  const char* const user = std::getenv("USER");
  return fmt::format("ssh -N -L {0}:127.0.0.1:{0} {1}{2}", port,
                     user == nullptr || *user == '\0' ? "" : fmt::format("{}@", user),
                     comm::host_name());
}

void watch(std::vector<RunData>& runs, std::uint16_t port) {
  announce_ending(nullptr);  // it ends at once
  LocalServer server(port);
  fmt::print("report on {} (this machine only); Ctrl-C ends it\n", server.address());
  fmt::print("from another machine: {}, then the same address there\n", tunnel_to(server.port()));
  std::fflush(stdout);
  WatchedRuns watched(runs);
  server.run([&](const std::string& path) { return watched.answer(path); }, interrupted());
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
                  fmt::format("{} belongs to one run; name only that run", option));
    }
  }
}

/// The files that a report reads.
std::vector<std::filesystem::path> inputs_of(const ReportArguments& arguments) {
  std::vector<std::filesystem::path> inputs(arguments.traces.begin(), arguments.traces.end());
  for (const std::filesystem::path run : arguments.runs) {
    for (const char* name :
         {"metrics.jsonl", "config.json", "run.json", "weights", "checkpoints"}) {
      inputs.push_back(run / name);
    }
  }
  return inputs;
}

void write_csv(const ReportArguments& arguments, const RunData& run) {
  text::write_output(arguments.csv,
                     {.kind = "a table",
                      .begins = "",
                      .overwrite = arguments.overwrite,
                      .inputs = inputs_of(arguments)},
                     csv_of(run.metrics()));
  fmt::print("metrics of {} steps in {}\n", run.metrics().rows(), arguments.csv.string());
}

void run_report(const ReportArguments& arguments) {
  check_options(arguments);
  text::refuse_same_output(arguments.csv, arguments.out);
  std::vector<RunData> runs = read_runs(arguments);
  if (!arguments.csv.empty()) {
    write_csv(arguments, runs.front());
    if (arguments.out.empty()) return;
  }
  if (arguments.watch) return watch(runs, static_cast<std::uint16_t>(arguments.port));
  const std::filesystem::path out =
      arguments.out.empty() ? std::filesystem::path(arguments.runs.front()) / "report.html"
                            : arguments.out;
  const text::OutputRule rule = page_rule(arguments.overwrite, inputs_of(arguments));
  text::check_output(out, rule);
  const std::string page = html_page(title_of(runs), report_data(runs, false));
  text::write_output(out, rule, page);
  fmt::print("report in {} ({})\n", out.string(), format_bytes(page.size()));
}

}  // namespace

void add_report(Command program) {
  auto arguments = std::make_shared<ReportArguments>();
  auto& a = *arguments;
  Command command = program.add_command(
      "report", "Write a page (HTML) with the curves, lanes and memory of runs");
  command.add_option("RUN", &a.runs, "Run directories; several are compared",
                     {.required = true, .takes = Names::folder});
  command.add_option("--out", &a.out,
                     "File of the page (default: report.html in the run directory)",
                     {.takes = Names::new_path, .value = "FILE"});
  command.add_option("--trace", &a.traces,
                     "Timeline to show, measured (train --trace) or predicted (plan --trace); give "
                     "one of each to compare (default: that of the run)",
                     {.single_argument = true, .takes = Names::file, .extensions = {".json"}});
  command.add_option("--csv", &a.csv,
                     "Write the metrics as a table, instead of the page unless --out is given",
                     {.takes = Names::new_path, .value = "FILE"});
  command.add_flag("--overwrite", &a.overwrite,
                   "Replace the files of --out and --csv, even of another kind");
  command.add_flag("--watch", &a.watch,
                   "Serve the page to browsers on this machine (through ssh -L also on "
                   "others) and update it while the runs continue",
                   "--out");
  command.add_option(
      "--port", &a.port, "Port of --watch (default: any free port)",
      {.range = std::pair(std::uint64_t{1}, std::uint64_t{65535}), .needs = "--watch"});
  command.set_action([arguments] { run_report(*arguments); });
}

}  // namespace ballast::tools
