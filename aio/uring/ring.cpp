#include "aio/uring/ring.h"

#include <array>
#include <cerrno>
#include <memory>
#include <string_view>

#include <fmt/format.h>
#include <sys/utsname.h>

#include "ballast/core/error.h"

namespace ballast::aio {
namespace {

struct FlagSet {
  unsigned flags;
  std::string_view names;
};

/// From the newest kernels (6.1) to the oldest. All keep completion work on the owner thread, where
/// it interrupts nobody.
constexpr std::array<FlagSet, 4> kFlagSets = {{
    {IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN | IORING_SETUP_COOP_TASKRUN,
     "SINGLE_ISSUER DEFER_TASKRUN COOP_TASKRUN"},
    {IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_COOP_TASKRUN, "SINGLE_ISSUER COOP_TASKRUN"},
    {IORING_SETUP_COOP_TASKRUN, "COOP_TASKRUN"},
    {0, "no setup flags"},
}};

constexpr std::array<std::pair<int, std::string_view>, 3> kOperations = {{
    {IORING_OP_READ, "IORING_OP_READ"},
    {IORING_OP_WRITE, "IORING_OP_WRITE"},
    {IORING_OP_POLL_ADD, "IORING_OP_POLL_ADD"},
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

std::string kernel_version() {
  utsname names{};
  if (uname(&names) != 0) return "kernel of unknown version";
  const std::string_view release = names.release;
  return fmt::format("kernel {}", release.substr(0, release.find_first_not_of("0123456789.")));
}

}  // namespace

Ring::Ring(unsigned entries) {
  int status = -EINVAL;
  for (const FlagSet& set : kFlagSets) {
    status = io_uring_queue_init(entries, &ring_, set.flags);
    flags_ = set.names;
    if (status != -EINVAL) break;
  }
  if (status < 0) {
    throw Error(ErrorCategory::io, "io_uring_setup: " + explain_refusal(-status), -status);
  }
  const std::unique_ptr<io_uring_probe, decltype(&io_uring_free_probe)> probe(
      io_uring_get_probe_ring(&ring_), &io_uring_free_probe);
  for (const auto& [operation, name] : kOperations) {
    if (probe == nullptr || io_uring_opcode_supported(probe.get(), operation) == 0) {
      io_uring_queue_exit(&ring_);
      throw Error(ErrorCategory::io, fmt::format("{} lacks {}", kernel_version(), name));
    }
  }
}

Ring::~Ring() {
  io_uring_queue_exit(&ring_);
}

std::string Ring::description() const {
  return fmt::format("{}, {}", kernel_version(), flags_);
}

}  // namespace ballast::aio
