#include <array>
#include <cstdlib>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/core/log.h"
#include "ballast/core/suggest.h"

#include "aio/backends.h"
#include "aio/block_queue.h"
#include "aio/faults/faulty_transport.h"

namespace ballast::aio {
namespace {

/// A way of carrying blocks. `probe` returns what was chosen or throws Error(io) with the reason.
struct Entry {
  std::string_view name;
  std::string (*probe)();
  std::unique_ptr<Transport> (*make)(unsigned depth);
};

std::string probe_threads() {
  return "pread and pwrite on a pool of threads";
}

/// In order of preference.
constexpr std::array<Entry, 2> kBackends = {{
    {"io_uring", probe_uring, make_uring_transport},
    {"threads", probe_threads, make_thread_transport},
}};

Backend probe(const Entry& entry) {
  Backend backend{.name = std::string(entry.name), .usable = false, .reason = {}};
  const char* disabled = std::getenv("BALLAST_IO_DISABLE");
  if (disabled != nullptr && entry.name == disabled) {
    backend.reason = "disabled by the environment variable BALLAST_IO_DISABLE";
    return backend;
  }
  try {
    backend.reason = entry.probe();
    backend.usable = true;
  } catch (const Error& error) {
    backend.reason = error.what();
  }
  return backend;
}

std::unique_ptr<Queue> make_with(const Entry& entry, const QueueOptions& options) {
  return std::make_unique<BlockQueue>(std::string(entry.name), options, [&](unsigned depth) {
    return with_faults_from_environment(entry.make(depth));
  });
}

std::unique_ptr<Queue> make_first_usable(const QueueOptions& options) {
  std::string refusals;
  for (const Entry& entry : kBackends) {
    Backend backend = probe(entry);
    if (backend.usable) {
      try {
        auto queue = make_with(entry, options);
        if (!refusals.empty()) {
          log(LogLevel::info, fmt::format("aio: using {} because {}", entry.name, refusals));
        }
        return queue;
      } catch (const Error& error) {
        if (error.category() != ErrorCategory::io) throw;
        backend.reason = error.what();
      }
    }
    refusals += fmt::format("{}{} is not usable ({})", refusals.empty() ? "" : ", ", entry.name,
                            backend.reason);
  }
  throw Error(ErrorCategory::io, "no aio backend is usable: " + refusals);
}

}  // namespace

std::vector<Backend> probe_backends() {
  std::vector<Backend> backends;
  backends.reserve(std::size(kBackends));
  for (const Entry& entry : kBackends) backends.push_back(probe(entry));
  return backends;
}

std::unique_ptr<Queue> make_queue(const QueueOptions& options,
                                  const Registration& /*registration*/) {
  if (options.backend == "auto") return make_first_usable(options);
  std::vector<std::string> names = {"auto"};
  std::string choices = "auto";
  for (const Entry& entry : kBackends) {
    if (options.backend == entry.name) {
      const Backend backend = probe(entry);
      if (backend.usable) return make_with(entry, options);
      throw Error(ErrorCategory::io,
                  fmt::format("aio backend {} is not usable here: {}; choose auto to fall back",
                              entry.name, backend.reason));
    }
    names.emplace_back(entry.name);
    choices += fmt::format(", {}", entry.name);
  }
  throw Error(ErrorCategory::config,
              fmt::format("there is no aio backend '{}'{}; choose one of {}", options.backend,
                          did_you_mean(options.backend, names), choices));
}

}  // namespace ballast::aio
