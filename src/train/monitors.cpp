#include "src/train/monitors.h"

#include <cerrno>
#include <charconv>
#include <chrono>
#include <span>
#include <string_view>
#include <system_error>

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include "ballast/comm/agreement.h"
#include "ballast/core/error.h"
#include "ballast/text/files.h"

#include "src/checkpoint/owner.h"

namespace ballast::train {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPrefix = "Train_Samples_";
constexpr std::string_view kSuffix = ".csv";
constexpr std::string_view kLoss = "Train/Samples/train_loss";
/// Describes the run directory in a folder outside of it.
constexpr const char* kOwner = ".ballast-run.json";

double seconds_since_1970() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

fs::path folder_of(const config::MonitorSection& section, const config::Config& config) {
  return (section.output_path.empty() ? config.ballast.out : section.output_path) /
         section.job_name;
}

std::string csv_name(std::string_view scalar) {
  return fmt::format("{}{}{}", kPrefix, scalar.substr(scalar.rfind('/') + 1), kSuffix);
}

/// Returns the first line of such a file.
std::string csv_head(std::string_view name) {
  name.remove_prefix(kPrefix.size());
  name.remove_suffix(kSuffix.size());
  return fmt::format("step,{}\n", name);
}

/// Returns the CSV files of a run in `folder`.
std::vector<fs::path> csv_files(const fs::path& folder) {
  std::vector<fs::path> found;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error); !error && entry != fs::directory_iterator();
       entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    if (name.starts_with(kPrefix) && name.ends_with(kSuffix)) found.push_back(entry->path());
  }
  if (!error || error == std::errc::no_such_file_or_directory) return found;
  throw Error(ErrorCategory::io, fmt::format("cannot read the folder {}", folder.string()),
              error.value());
}

/// Returns the size of the header and the complete rows before the first row above `samples`.
Bytes bytes_to_keep(std::string_view text, std::int64_t samples) {
  std::size_t kept = 0;
  for (std::size_t end = text.find('\n'); end != text.npos; end = text.find('\n', kept)) {
    std::int64_t step = 0;
    const auto read = std::from_chars(text.data() + kept, text.data() + end, step);
    if (kept > 0 && (read.ec != std::errc{} || step > samples)) break;
    kept = end + 1;
  }
  return kept;
}

/// --overwrite must not change files elsewhere, so symbolic links are refused.
void refuse_links(const std::vector<fs::path>& files) {
  for (const fs::path& file : files) {
    std::error_code error;
    if (!fs::is_symlink(file, error) || !fs::is_regular_file(file, error)) continue;
    throw Error(ErrorCategory::usage,
                fmt::format("{} is a symbolic link, so --overwrite does not replace it; choose "
                            "another csv_monitor.output_path or csv_monitor.job_name",
                            file.string()));
  }
}

/// Returns whether `folder` is below the run directory.
bool is_inside(const fs::path& folder, const fs::path& run) {
  std::error_code error;
  const fs::path inside =
      fs::weakly_canonical(folder, error).lexically_relative(fs::weakly_canonical(run, error));
  return !inside.empty() && *inside.begin() != "..";
}

/// Refuses a folder outside of the run directory `run` with the files of another run, of which this
/// one may be a copy: rows after its step would be cut off.
void refuse_files_of_another_run(const fs::path& folder, const fs::path& run) {
  const auto owner = checkpoint::owner_of(run);
  const auto recorded = checkpoint::read_owner(folder / kOwner);
  if (is_inside(folder, run) || !owner || !recorded || recorded->is_same(*owner)) return;
  throw Error(ErrorCategory::usage,
              fmt::format("{} has the files of the run {}; choose another csv_monitor.output_path "
                          "or csv_monitor.job_name, or remove {} if this run is to continue them",
                          folder.string(), recorded->path.string(), (folder / kOwner).string()));
}

std::string content_of(const fs::path& path) {
  const Descriptor file = text::open_file(path, O_RDONLY, ErrorCategory::io);
  std::string content(text::regular_file_size(file, path, ErrorCategory::io), '\0');
  text::read_fully(file, path, 0, std::as_writable_bytes(std::span(content)));
  return content;
}

}  // namespace

std::vector<formats::Scalar> scalars_of(const StepMetrics& metrics) {
  std::vector<formats::Scalar> scalars;
  if (metrics.loss) scalars.push_back({kLoss, *metrics.loss});
  scalars.push_back({"Train/Samples/lr", metrics.lr});
  scalars.push_back({"Train/Samples/grad_norm", metrics.grad_norm});
  scalars.push_back({"Train/Samples/tokens_per_second", metrics.tokens_per_second});
  scalars.push_back(
      {"Train/Samples/nvme_bytes_written", static_cast<double>(metrics.nvme_bytes_written)});
  if (metrics.loss_scale) scalars.push_back({"Train/Samples/loss_scale", *metrics.loss_scale});
  if (metrics.eval_loss) scalars.push_back({"Train/Samples/eval_loss", *metrics.eval_loss});
  if (metrics.rewards) {
    scalars.push_back({"Train/Samples/rewards_chosen", metrics.rewards->chosen});
    scalars.push_back({"Train/Samples/rewards_rejected", metrics.rewards->rejected});
    scalars.push_back({"Train/Samples/rewards_accuracy", metrics.rewards->accuracy});
    scalars.push_back({"Train/Samples/rewards_margin", metrics.rewards->margin()});
  }
  if (!metrics.experts) return scalars;
  scalars.push_back({"Train/Samples/experts_balance_loss", metrics.experts->balance_loss});
  scalars.push_back({"Train/Samples/experts_router_z_loss", metrics.experts->router_z_loss});
  scalars.push_back({"Train/Samples/experts_largest_load", metrics.experts->largest_load});
  scalars.push_back({"Train/Samples/experts_idle", static_cast<double>(metrics.experts->idle)});
  return scalars;
}

Monitors::Monitors(const config::Config& config, RunDirectory use)
    : batch_(static_cast<std::int64_t>(config.batch.train_batch)),
      own_rows_(use == RunDirectory::continued) {
  const auto open = [&](const config::MonitorSection& section,
                        std::string_view name) -> std::optional<fs::path> {
    if (!section.enabled) return std::nullopt;
    const fs::path folder = folder_of(section, config);
    made_.emplace_back(folder, fmt::format("folder of {}", name),
                       fmt::format("choose another with {}.output_path", name));
    if (::access(folder.c_str(), W_OK | X_OK) == 0) return folder;
    const int error_number = errno;
    throw Error(ErrorCategory::io,
                fmt::format("cannot write to {}; choose another folder with {}.output_path",
                            folder.string(), name),
                error_number);
  };
  events_folder_ = open(config.tensorboard, "tensorboard");
  csv_folder_ = open(config.csv_monitor, "csv_monitor");
  if (!csv_folder_) return;
  if (!is_inside(*csv_folder_, config.ballast.out)) run_ = config.ballast.out;
  if (use == RunDirectory::continued) {
    refuse_files_of_another_run(*csv_folder_, config.ballast.out);
    return;
  }
  const auto used = csv_files(*csv_folder_);
  if (use == RunDirectory::overwritten) refuse_links(used);
  if (used.empty() || use == RunDirectory::overwritten) return;
  throw Error(ErrorCategory::usage,
              fmt::format("{} exists: choose another csv_monitor.output_path or "
                          "csv_monitor.job_name, or give --overwrite to replace it",
                          used.front().string()));
}

Monitors::~Monitors() = default;

void Monitors::write(const StepMetrics& metrics) {
  warn_of_deleted_files();
  const auto samples = static_cast<std::int64_t>(metrics.step) * batch_;
  const auto scalars = scalars_of(metrics);
  if (events_folder_) write_events(samples, scalars);
  if (csv_folder_) write_csv(samples, scalars, metrics.loss.has_value());
  begins_ = false;
  own_rows_ = true;
}

void Monitors::warn_of_deleted_files() const {
  const WaitingFile* deleted = events_.is_deleted() ? &events_ : nullptr;
  for (const auto& [name, file] : csv_) {
    if (deleted == nullptr && file.is_deleted()) deleted = &file;
  }
  if (deleted == nullptr) return;
  log(LogLevel::warning,
      fmt::format("{} was deleted; it is created again with the rows from now on",
                  deleted->path().string()));
}

void Monitors::write_events(std::int64_t samples, const std::vector<formats::Scalar>& scalars) {
  const double now = seconds_since_1970();
  if (events_.path().empty()) {
    // TensorBoard reads files in the order of their names.
    const auto name = fmt::format("events.out.tfevents.{:010}.{}.{:07}.0",
                                  static_cast<std::int64_t>(now), comm::host_name(), ::getpid());
    events_ = WaitingFile(*events_folder_ / name, formats::event_file_head(now));
  }
  events_.append(static_cast<std::uint64_t>(samples),
                 (begins_ ? formats::event_session_start(now, samples) : "") +
                     formats::event_scalars(now, samples, scalars));
}

void Monitors::write_csv(std::int64_t samples, const std::vector<formats::Scalar>& scalars,
                         bool has_loss) {
  if (begins_) {
    cut_csv(samples);
    const auto owner = run_.empty() ? std::nullopt : checkpoint::owner_of(run_);
    if (owner) checkpoint::write_owner(*csv_folder_ / kOwner, *owner);
  }
  if (!has_loss) {
    csv_file(csv_name(kLoss))
        .append(static_cast<std::uint64_t>(samples), fmt::format("{},\n", samples));
  }
  for (const formats::Scalar& scalar : scalars) {
    csv_file(csv_name(scalar.name))
        .append(static_cast<std::uint64_t>(samples), fmt::format("{},{}\n", samples, scalar.value));
  }
}

/// Removes rows of other runs, and rows from `samples` on.
void Monitors::cut_csv(std::int64_t samples) {
  for (const fs::path& path : csv_files(*csv_folder_)) {
    WaitingFile& file = csv_file(path.filename().string());
    if (!file.file().descriptor().is_open()) {
      text::make_separate(path);
      file = WaitingFile(text::AppendedFile(path, 0), csv_head(path.filename().string()));
    }
    file.file().cut(own_rows_ ? bytes_to_keep(content_of(path), samples - 1) : 0);
  }
  for (auto& [name, file] : csv_) file.forget_after(static_cast<std::uint64_t>(samples) - 1);
}

WaitingFile& Monitors::csv_file(const std::string& name) {
  const auto found = csv_.find(name);
  if (found != csv_.end()) return found->second;
  return csv_.emplace(name, WaitingFile(*csv_folder_ / name, csv_head(name))).first->second;
}

const WaitingFile* Monitors::waiting() const {
  if (events_.failure()) return &events_;
  for (const auto& [name, file] : csv_) {
    if (file.failure()) return &file;
  }
  return nullptr;
}

std::vector<std::string> Monitors::missing() const {
  std::vector<std::string> lines = {events_.missing()};
  for (const auto& [name, file] : csv_) lines.push_back(file.missing());
  std::erase(lines, "");
  return lines;
}

void Monitors::flush() {
  events_.flush();
  for (auto& [name, file] : csv_) file.flush();
}

void Monitors::moved(const fs::path& from, const fs::path& to) {
  const auto place = [&](const fs::path& path) {
    const fs::path inside = path.lexically_relative(from);
    return inside.empty() || *inside.begin() == ".." ? path : to / inside;
  };
  for (auto* folder : {&events_folder_, &csv_folder_}) {
    if (*folder) *folder = place(**folder);
  }
  events_.moved_to(place(events_.path()));
  for (auto& [name, file] : csv_) file.moved_to(place(file.path()));
}

}  // namespace ballast::train
