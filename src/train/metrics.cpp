#include "ballast/train/metrics.h"

#include <cerrno>
#include <span>
#include <string_view>
#include <utility>

#include <fcntl.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <sys/stat.h>
#include <unistd.h>

#include "ballast/core/error.h"

#include "src/train/posix_file.h"

namespace ballast::train {
namespace {

/// Bytes of `text` up to the end of the last whole line of a step before `first_step`.
std::size_t length_to_keep(std::string_view text, std::uint64_t first_step,
                           const std::filesystem::path& path) {
  std::size_t kept = 0;
  for (std::size_t number = 1; kept < text.size(); ++number) {
    const auto end = text.find('\n', kept);
    if (end == std::string_view::npos) return kept;
    const auto line = nlohmann::json::parse(text.substr(kept, end - kept), nullptr, false);
    const auto step = line.is_object() ? line.find("step") : line.end();
    if (step == line.end() || !step->is_number_unsigned()) {
      throw Error(ErrorCategory::data,
                  fmt::format("line {} of {} is no step of a run: move the file away", number,
                              path.string()));
    }
    if (step->get<std::uint64_t>() >= first_step) return kept;
    kept = end + 1;
  }
  return kept;
}

}  // namespace

std::string to_json_line(const StepMetrics& metrics) {
  nlohmann::ordered_json line;
  line["step"] = metrics.step;
  line["loss"] = metrics.loss;
  line["lr"] = metrics.lr;
  line["grad_norm"] = metrics.grad_norm;
  line["tokens"] = metrics.tokens;
  line["step_seconds"] = metrics.step_seconds;
  line["tokens_per_second"] = metrics.tokens_per_second;
  line["skipped"] = metrics.skipped;
  line["lanes"] = nlohmann::ordered_json::object();
  for (const auto& [lane, seconds] : metrics.busy_seconds) {
    line["lanes"][lane]["busy_seconds"] = seconds;
  }
  for (const auto& [lane, seconds] : metrics.stalled_seconds) {
    line["lanes"][lane]["stalled_seconds"] = seconds;
  }
  line["bytes"] = metrics.bytes;
  line["peak_bytes"] = metrics.peak_bytes;
  line["nvme_bytes_written"] = metrics.nvme_bytes_written;
  if (metrics.eval_loss) line["eval_loss"] = *metrics.eval_loss;
  return line.dump();
}

struct MetricsWriter::File {
  std::filesystem::path path;
  Descriptor descriptor;
  Bytes size = 0;

  void cut(std::uint64_t first_step) {
    std::string text(regular_file_size(descriptor, path, ErrorCategory::io), '\0');
    read_fully(descriptor, path, 0, std::as_writable_bytes(std::span(text)));
    size = length_to_keep(text, first_step, path);
    if (size != text.size() && ::ftruncate(descriptor.number(), static_cast<off_t>(size)) != 0) {
      const int error_number = errno;
      throw Error(ErrorCategory::io, fmt::format("cannot shorten {}", path.string()), error_number);
    }
  }
};

MetricsWriter::MetricsWriter(std::filesystem::path path, std::uint64_t first_step)
    : file_(std::make_unique<File>()) {
  file_->path = std::move(path);
  file_->descriptor = open_file(file_->path, O_RDWR | O_CREAT | O_APPEND, ErrorCategory::io);
  struct stat status = {};
  const bool is_device =
      ::fstat(file_->descriptor.number(), &status) == 0 && S_ISCHR(status.st_mode);
  if (!is_device) file_->cut(first_step);
}

MetricsWriter::~MetricsWriter() = default;

void MetricsWriter::write(const StepMetrics& metrics) {
  const auto line = to_json_line(metrics) + '\n';
  try {
    write_fully(file_->descriptor, file_->path, std::as_bytes(std::span(line)));
  } catch (const Error&) {
    // If this fails too, the next opening cuts the partial line off; the first error matters more.
    [[maybe_unused]] const int result =
        ::ftruncate(file_->descriptor.number(), static_cast<off_t>(file_->size));
    throw;
  }
  file_->size += line.size();
}

}  // namespace ballast::train
