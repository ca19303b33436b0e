#include "tools/commands/inspected.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <unistd.h>

#include "ballast/checkpoint/swap_files.h"
#include "ballast/core/error.h"
#include "ballast/core/units.h"
#include "ballast/text/json.h"

#include "tools/console/terminal.h"
#include "tools/signals.h"

namespace ballast::tools {

namespace {

using checkpoint::CheckpointQuestions;
using checkpoint::CheckpointReport;
using text::Json;

/// Returns "1 file", "2 files".
std::string counted(std::uint64_t count, const std::string& name) {
  return fmt::format("{} {}{}", count, name, count == 1 ? "" : "s");
}

/// Returns "intact" and the hash if they were asked for, or the damage.
std::string state_text(const CheckpointReport& report, const CheckpointQuestions& questions) {
  if (!report.usable()) return report.damage + report.unreadable;
  std::string text = questions.whole || questions.hash ? "intact" : "";
  if (report.hash) text += fmt::format(", XXH3 {:016x}", *report.hash);
  return text;
}

/// The checkpoint that --resume takes: the latest one that is not damaged.
const CheckpointReport* latest_intact(const std::vector<CheckpointReport>& reports) {
  const auto found = std::find_if(reports.begin(), reports.end(),
                                  [](const auto& report) { return report.damage.empty(); });
  return found == reports.end() ? nullptr : &*found;
}

std::string resume_text(const CheckpointReport* found, bool verified) {
  if (found == nullptr) return "finds no intact checkpoint";
  const std::string folder = found->folder.string();
  if (!found->unreadable.empty()) return fmt::format("ends at {}, which cannot be read", folder);
  return fmt::format("takes {}{}", folder, verified ? "" : ", if it is intact");
}

}  // namespace

std::vector<CheckpointReport> examine(const std::vector<std::filesystem::path>& folders,
                                      const CheckpointQuestions& questions) {
  const Terminal terminal(isatty(STDOUT_FILENO) == 1);
  std::vector<CheckpointReport> reports;
  reports.reserve(folders.size());
  for (const auto& folder : folders) {
    reports.push_back(
        checkpoint::examine_checkpoint(folder, questions, [&](Bytes done, Bytes total) {
          if (interrupted()) throw Error(ErrorCategory::interrupted, "interrupted");
          terminal.live(fmt::format("reading {}, {} of {}", folder.string(), format_bytes(done),
                                    format_bytes(total)));
        }));
  }
  return reports;
}

Json report_json(const CheckpointReport& report, const CheckpointQuestions& questions) {
  Json out = Json::object({{"path", report.folder.string()}});
  if (report.content) {
    const checkpoint::CheckpointContent& content = *report.content;
    Json states = Json::array();
    for (const checkpoint::KeptState& state : content.states) {
      states.push_back(Json::object({{"kind", state.kind},
                                     {"width", state.width},
                                     {"entries", state.entries},
                                     {"bytes", state.bytes()}}));
    }
    Json files = Json::array();
    for (const checkpoint::CheckpointFile& file : content.files) {
      files.push_back(Json::object({{"path", file.path.string()}, {"bytes", file.bytes}}));
    }
    out["step"] = content.facts.step;
    out["updates"] = content.facts.updates;
    out["batch"] = content.facts.batch;
    out["sequence_length"] = content.facts.length;
    out["portable"] = content.portable;
    out["ranks"] = content.ranks;
    out["bytes"] = content.bytes();
    out["states"] = states;
    out["files"] = files;
  }
  if (!report.damage.empty()) out["damage"] = report.damage;
  if (!report.unreadable.empty()) out["unreadable"] = report.unreadable;
  const bool known = (questions.whole || questions.hash) && report.unreadable.empty();
  if (known) out["whole"] = report.damage.empty();
  if (report.hash) out["xxh3"] = fmt::format("{:016x}", *report.hash);
  return out;
}

Json resumed_one(const std::vector<CheckpointReport>& reports) {
  const CheckpointReport* const found = latest_intact(reports);
  return found == nullptr || !found->usable() ? Json() : Json(found->folder.string());
}

void print_checkpoint(const CheckpointReport& report, const CheckpointQuestions& questions) {
  fmt::print("{}\n", report.folder.string());
  if (!report.content) return;
  const checkpoint::CheckpointContent& content = *report.content;
  const checkpoint::CheckpointFacts& facts = content.facts;
  fmt::print("step {} ({}), {} of {} per step, {}written by {}\n", facts.step,
             counted(facts.updates, "update"), counted(facts.batch, "sequence"),
             counted(facts.length, "token"), content.portable ? "portable, states " : "",
             counted(content.ranks, "rank"));
  fmt::print("  {:<17} {:>5} {:>10} {:>10}\n", "state", "width", "entries", "bytes");
  for (const checkpoint::KeptState& state : content.states) {
    fmt::print("  {:<17} {:>5} {:>10} {:>10}\n", state.kind, state.width,
               format_count(static_cast<double>(state.entries)), format_bytes(state.bytes()));
  }
  for (const checkpoint::CheckpointFile& file : content.files) {
    fmt::print("  {:<34} {:>10}\n", file.path.filename().string(), format_bytes(file.bytes));
  }
  fmt::print("{} in {}\n", format_bytes(content.bytes()), counted(content.files.size(), "file"));
  const std::string found = report.usable() ? state_text(report, questions) : "";
  if (!found.empty()) fmt::print("{}\n", found);
}

void print_checkpoints(const std::vector<CheckpointReport>& reports,
                       const CheckpointQuestions& questions) {
  for (const CheckpointReport& report : reports) {
    std::string line = fmt::format("  {:<14}", report.folder.filename().string());
    if (report.content) {
      line += fmt::format(" {:>10}  {:<9}", format_bytes(report.content->bytes()),
                          counted(report.content->ranks, "rank"));
    }
    line += "  " + state_text(report, questions);
    fmt::print("{}\n", line.substr(0, line.find_last_not_of(' ') + 1));
  }
  fmt::print("--resume {}\n",
             resume_text(latest_intact(reports), questions.whole || questions.hash));
}

void refuse_damage(const std::filesystem::path& path,
                   const std::vector<CheckpointReport>& reports) {
  const auto unreadable = std::find_if(reports.begin(), reports.end(), [](const auto& report) {
    return !report.unreadable.empty();
  });
  if (unreadable != reports.end()) throw Error(ErrorCategory::io, unreadable->unreadable);
  const auto damaged = [](const CheckpointReport& report) { return !report.damage.empty(); };
  const auto first = std::find_if(reports.begin(), reports.end(), damaged);
  if (first == reports.end()) return;
  if (reports.size() == 1 && checkpoint::names_checkpoint(path)) {
    throw Error(ErrorCategory::data, first->damage + checkpoint::advice_after_damage(path));
  }
  throw Error(
      ErrorCategory::data,
      fmt::format("{}: {} of {} damaged", path.string(),
                  std::count_if(reports.begin(), reports.end(), damaged),
                  counted(reports.size(), "checkpoint") + (reports.size() == 1 ? " is" : " are")));
}

namespace {

using checkpoint::SwapFile;
using checkpoint::SwapUse;

std::vector<SwapFile> unowned_of(const std::vector<SwapFile>& files) {
  std::vector<SwapFile> found;
  std::copy_if(files.begin(), files.end(), std::back_inserter(found),
               [](const SwapFile& file) { return file.use == SwapUse::unowned; });
  return found;
}

std::string counted(std::size_t count) {
  return fmt::format("{} file{}", count, count == 1 ? "" : "s");
}

/// Explains the state of a file.
std::string explain(const SwapFile& file) {
  const std::string run = file.run.string();
  switch (file.use) {
    case SwapUse::in_use:
      return run.empty() ? "by a process" : fmt::format("by a process that trains in {}", run);
    case SwapUse::kept:
      return fmt::format("for {}", file.checkpoint.string());
    case SwapUse::leftover:
      return fmt::format("of {}, which removes it when it continues", run);
    case SwapUse::unowned:
      return run.empty() ? "left by a crashed process"
                         : fmt::format("its run {} does not exist", run);
    case SwapUse::unknown:
      return file.note;
  }
  return "";
}

Json json_of(const std::vector<SwapFile>& files) {
  const auto path_or_null = [](const std::filesystem::path& path) {
    return path.empty() ? Json() : Json(path.string());
  };
  Json list = Json::array();
  for (const SwapFile& file : files) {
    Json entry = Json::object({{"path", file.path.string()},
                               {"bytes", file.bytes},
                               {"state", to_string(file.use)},
                               {"run", path_or_null(file.run)},
                               {"run_exists", file.run_exists},
                               {"checkpoint", path_or_null(file.checkpoint)}});
    if (!file.note.empty()) entry["note"] = file.note;
    list.push_back(std::move(entry));
  }
  return list;
}

void print_list(const std::filesystem::path& directory, const std::vector<SwapFile>& files) {
  if (files.empty()) return fmt::print("no swap files in {}\n", directory.string());
  fmt::print("swap files in {}\n", directory.string());
  std::size_t width = 0;
  for (const SwapFile& file : files) {
    width = std::max(width, file.path.filename().string().size());
  }
  for (const SwapFile& file : files) {
    fmt::print("  {:<{}}  {:>10}  {:<8}  {}\n", file.path.filename().string(), width,
               format_bytes(file.bytes), to_string(file.use), explain(file));
  }
  fmt::print("{} in {}\n", format_bytes(space_of(files)), counted(files.size()));
}

}  // namespace

void inspect_swap(const std::filesystem::path& directory, bool remove, bool json) {
  std::vector<SwapFile> files = checkpoint::list_swap_files(directory);
  const std::vector<SwapFile> unowned = unowned_of(files);
  std::vector<SwapFile> removed;
  if (remove) {
    removed = checkpoint::remove_unowned(directory, unowned);
    std::erase_if(files, [&](const SwapFile& file) {
      return std::any_of(removed.begin(), removed.end(),
                         [&](const SwapFile& gone) { return gone.path == file.path; });
    });
  }
  const Bytes removed_bytes = space_of(removed);
  if (json) {
    constexpr unsigned kLevels = 2;  // one line per file
    const Json out = Json::object({{"path", directory.string()},
                                   {"bytes", space_of(files)},
                                   {"unowned_bytes", space_of(unowned_of(files))},
                                   {"files", json_of(files)},
                                   {"removed", json_of(removed)},
                                   {"removed_bytes", removed_bytes}});
    return fmt::print("{}\n", out.pretty(kLevels));
  }
  print_list(directory, files);
  for (const SwapFile& file : removed) fmt::print("removed {}\n", file.path.string());
  if (remove) {
    fmt::print("removed {} with {}\n", counted(removed.size()), format_bytes(removed_bytes));
  } else if (!unowned.empty()) {
    fmt::print("{} in {} that no run owns; --remove removes them\n",
               format_bytes(space_of(unowned)), counted(unowned.size()));
  }
}

}  // namespace ballast::tools
