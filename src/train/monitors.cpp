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

#include "ballast/comm/together.h"
#include "ballast/core/error.h"

namespace ballast::train {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPrefix = "Train_Samples_";
constexpr std::string_view kSuffix = ".csv";

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

/// The CSV files of a run in `folder`.
std::vector<fs::path> csv_files(const fs::path& folder) {
  std::vector<fs::path> found;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error); !error && entry != fs::directory_iterator();
       entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    if (name.starts_with(kPrefix) && name.ends_with(kSuffix)) found.push_back(entry->path());
  }
  if (!error) return found;
  throw Error(ErrorCategory::io, fmt::format("cannot read the folder {}", folder.string()),
              error.value());
}

/// Bytes of the header and the whole rows before the first one of more than `samples`.
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

std::string content_of(const fs::path& path) {
  const Descriptor file = text::open_file(path, O_RDONLY, ErrorCategory::io);
  std::string content(text::regular_file_size(file, path, ErrorCategory::io), '\0');
  text::read_fully(file, path, 0, std::as_writable_bytes(std::span(content)));
  return content;
}

}  // namespace

std::vector<Scalar> scalars_of(const StepMetrics& metrics) {
  std::vector<Scalar> scalars = {
      {"Train/Samples/train_loss", metrics.loss},
      {"Train/Samples/lr", metrics.lr},
      {"Train/Samples/grad_norm", metrics.grad_norm},
      {"Train/Samples/tokens_per_second", metrics.tokens_per_second},
      {"Train/Samples/nvme_bytes_written", static_cast<double>(metrics.nvme_bytes_written)}};
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
  if (!csv_folder_ || use != RunDirectory::fresh) return;
  const auto used = csv_files(*csv_folder_);
  if (used.empty()) return;
  throw Error(ErrorCategory::usage,
              fmt::format("{} exists: choose another csv_monitor.output_path or "
                          "csv_monitor.job_name, or give --overwrite to replace it",
                          used.front().string()));
}

Monitors::~Monitors() = default;

void Monitors::write(const StepMetrics& metrics) {
  const auto samples = static_cast<std::int64_t>(metrics.step) * batch_;
  const auto scalars = scalars_of(metrics);
  if (events_folder_) write_events(samples, scalars);
  if (csv_folder_) write_csv(samples, scalars);
  begins_ = false;
  own_rows_ = true;
}

void Monitors::write_events(std::int64_t samples, const std::vector<Scalar>& scalars) {
  const double now = seconds_since_1970();
  if (!events_.descriptor().is_open()) {
    const auto name = fmt::format("events.out.tfevents.{:010}.{}.{}.0",
                                  static_cast<std::int64_t>(now), comm::host_name(), ::getpid());
    events_ = text::AppendedFile(*events_folder_ / name, O_EXCL);
    events_.append(event_file_head(now));
  }
  events_.append((begins_ ? event_session_start(now, samples) : "") +
                 event_scalars(now, samples, scalars));
}

void Monitors::write_csv(std::int64_t samples, const std::vector<Scalar>& scalars) {
  if (begins_) cut_csv(samples);
  for (const Scalar& scalar : scalars) {
    csv_file(scalar).append(fmt::format("{},{}\n", samples, scalar.value));
  }
}

/// Removes the rows of other runs and those from `samples` on.
void Monitors::cut_csv(std::int64_t samples) {
  csv_.clear();
  for (const fs::path& path : csv_files(*csv_folder_)) {
    auto& file = csv_[path.filename().string()] = text::AppendedFile(path, 0);
    file.cut(own_rows_ ? bytes_to_keep(content_of(path), samples - 1) : 0);
  }
}

text::AppendedFile& Monitors::csv_file(const Scalar& scalar) {
  const std::string name = csv_name(scalar.name);
  auto found = csv_.find(name);
  if (found == csv_.end()) {
    found = csv_.emplace(name, text::AppendedFile(*csv_folder_ / name, O_EXCL)).first;
  }
  text::AppendedFile& file = found->second;
  if (file.size() == 0) {
    file.append(fmt::format("step,{}\n", scalar.name.substr(scalar.name.rfind('/') + 1)));
  }
  return file;
}

}  // namespace ballast::train
