#include "aio/uring/ring.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <functional>
#include <memory>
#include <string_view>

#include <fmt/format.h>
#include <sys/resource.h>
#include <sys/uio.h>
#include <sys/utsname.h>

#include "ballast/core/error.h"
#include "ballast/core/log.h"

namespace ballast::aio {
namespace {

struct FlagSet {
  unsigned flags;
  std::string_view names;
};

/// Sets of flags, from the newest kernels (6.1) to the oldest. All keep completion work on the
/// owner thread.
constexpr std::array<FlagSet, 4> kFlagSets = {{
    {IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN | IORING_SETUP_COOP_TASKRUN,
     "SINGLE_ISSUER DEFER_TASKRUN COOP_TASKRUN"},
    {IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_COOP_TASKRUN, "SINGLE_ISSUER COOP_TASKRUN"},
    {IORING_SETUP_COOP_TASKRUN, "COOP_TASKRUN"},
    {0, "no setup flags"},
}};

/// With a submitting kernel thread there is no task work for the owner thread.
constexpr std::array<FlagSet, 2> kSubmissionPollingSets = {{
    {IORING_SETUP_SQPOLL | IORING_SETUP_SINGLE_ISSUER, "SQPOLL SINGLE_ISSUER"},
    {IORING_SETUP_SQPOLL, "SQPOLL"},
}};

/// After this long without work the submitting kernel thread sleeps.
constexpr unsigned kSubmitterIdleMilliseconds = 50;

constexpr std::array<std::pair<int, std::string_view>, 4> kOperations = {{
    {IORING_OP_READ, "IORING_OP_READ"},
    {IORING_OP_WRITE, "IORING_OP_WRITE"},
    {IORING_OP_READ_FIXED, "IORING_OP_READ_FIXED"},
    {IORING_OP_WRITE_FIXED, "IORING_OP_WRITE_FIXED"},
}};

std::string explain_refusal(int error_number) {
  switch (error_number) {
    case EPERM:
    case EACCES:
      return "denied by seccomp or kernel.io_uring_disabled";
    case ENOSYS:
      return "the kernel has no io_uring, or seccomp hides it";
    case ENOMEM:
      return "not enough memory for the ring; raise RLIMIT_MEMLOCK (ulimit -l) or lower the depth";
    case EMFILE:
    case ENFILE:
      return "out of file descriptors; raise ulimit -n";
    default:
      return "the kernel refused the ring";
  }
}

std::string explain_unpinned(int error_number) {
  rlimit limit{};
  if (error_number == ENOMEM && getrlimit(RLIMIT_MEMLOCK, &limit) == 0 &&
      limit.rlim_cur != RLIM_INFINITY) {
    return fmt::format("the limit on locked memory is {}; raise it (ulimit -l)",
                       format_bytes(limit.rlim_cur));
  }
  return strerror(error_number);
}

/// io_uring_register(2): at most 1 GiB per buffer.
constexpr Bytes kLargestBuffer = 1 * kGiB;

std::string kernel_version() {
  utsname names{};
  if (uname(&names) != 0) return "kernel of unknown version";
  const std::string_view release = names.release;
  return fmt::format("kernel {}", release.substr(0, release.find_first_not_of("0123456789.")));
}

}  // namespace

Ring::Ring(unsigned entries, Polling polling) {
  int status = -EINVAL;
  const std::span<const FlagSet> sets =
      polling.submissions ? std::span<const FlagSet>(kSubmissionPollingSets) : kFlagSets;
  for (const FlagSet& set : sets) {
    io_uring_params parameters{};
    parameters.flags = set.flags | (polling.completions ? IORING_SETUP_IOPOLL : 0U);
    parameters.sq_thread_idle = kSubmitterIdleMilliseconds;
    status = io_uring_queue_init_params(entries, &ring_, &parameters);
    flags_ = std::string(set.names) + (polling.completions ? " IOPOLL" : "");
    if (status != -EINVAL) break;
  }
  if (status < 0) {
    throw Error(ErrorCategory::io, "io_uring_setup: " + explain_refusal(-status), -status);
  }
  require_operations();
}

void Ring::require_operations() {
  const std::unique_ptr<io_uring_probe, decltype(&io_uring_free_probe)> probe(
      io_uring_get_probe_ring(&ring_), &io_uring_free_probe);
  std::string lacking;
  for (const auto& [operation, name] : kOperations) {
    if (probe == nullptr || io_uring_opcode_supported(probe.get(), operation) == 0) lacking = name;
  }
  // The timeout of a wait (kernel 5.11).
  if ((ring_.features & IORING_FEAT_EXT_ARG) == 0U) lacking = "IORING_FEAT_EXT_ARG";
  if (lacking.empty()) return;
  io_uring_queue_exit(&ring_);
  throw Error(ErrorCategory::io, fmt::format("{} lacks {}", kernel_version(), lacking));
}

Ring::~Ring() {
  io_uring_queue_exit(&ring_);
}

std::string Ring::description() const {
  return fmt::format("{}, {}", kernel_version(), flags_);
}

RegisteredResources::RegisteredResources(Ring& ring, const Registration& registration) {
  for (const File* file : registration.files) files_.push_back(file->descriptor());
  if (!files_.empty()) {
    const int status =
        io_uring_register_files(ring.get(), files_.data(), static_cast<unsigned>(files_.size()));
    if (status < 0) {
      log(LogLevel::info,
          fmt::format("aio: cannot register files with io_uring: {}", strerror(-status)));
      files_.clear();
    }
  }
  for (HostBytes memory : registration.memory) {
    while (!memory.empty()) {
      const HostBytes slice = memory.first(std::min<std::size_t>(memory.size(), kLargestBuffer));
      buffers_.push_back(slice);
      memory = memory.subspan(slice.size());
    }
  }
  if (buffers_.empty()) return;
  std::sort(buffers_.begin(), buffers_.end(),
            [](HostBytes a, HostBytes b) { return std::less<>()(a.data(), b.data()); });
  std::vector<iovec> vectors;
  Bytes total = 0;
  for (const HostBytes buffer : buffers_) {
    vectors.push_back({buffer.data(), buffer.size()});
    total += buffer.size();
  }
  const int status =
      io_uring_register_buffers(ring.get(), vectors.data(), static_cast<unsigned>(vectors.size()));
  if (status == 0) return;
  buffers_.clear();
  log(LogLevel::info,
      fmt::format("aio: cannot register {} of buffers with io_uring, which costs some CPU "
                  "time: {}",
                  format_bytes(total), explain_unpinned(-status)));
}

int RegisteredResources::file(int descriptor) const {
  const auto found = std::find(files_.begin(), files_.end(), descriptor);
  return found == files_.end() ? -1 : static_cast<int>(found - files_.begin());
}

int RegisteredResources::buffer(const std::byte* data, std::size_t length) const {
  auto after = std::upper_bound(
      buffers_.begin(), buffers_.end(), data,
      [](const std::byte* at, HostBytes buffer) { return std::less<>()(at, buffer.data()); });
  if (after == buffers_.begin()) return -1;
  const HostBytes buffer = *--after;
  const auto offset = static_cast<std::size_t>(data - buffer.data());
  if (offset >= buffer.size() || length > buffer.size() - offset) return -1;
  return static_cast<int>(after - buffers_.begin());
}

}  // namespace ballast::aio
