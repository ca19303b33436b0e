#include <algorithm>
#include <array>
#include <cstdlib>
#include <limits>

#include <fmt/format.h>

#include "ballast/core/error.h"

#include "aio/block_queue.h"
#include "aio/transport.h"

namespace ballast::aio {
namespace {

using Make = std::unique_ptr<Transport> (*)(unsigned depth, const QueueOptions& options,
                                            const Registration& registration);

/// A backend. `probe` returns a description or throws Error(io) with the reason.
struct Entry {
  std::string_view name;
  std::string (*probe)();
  Make make;
  unsigned max_depth;
  bool moves_data;  ///< false: "auto" never chooses it
};

std::string probe_threads() {
  return fmt::format("pread and pwrite on up to {} threads", kMaxThreads);
}

std::string probe_null() {
  return "moves no data; measures the overhead of the queue";
}

std::unique_ptr<Transport> make_threads(unsigned depth, const QueueOptions& /*options*/,
                                        const Registration& /*registration*/) {
  return make_thread_transport(depth);
}

std::unique_ptr<Transport> make_null(unsigned /*depth*/, const QueueOptions& /*options*/,
                                     const Registration& /*registration*/) {
  return make_null_transport();
}

constexpr unsigned kAnyDepth = std::numeric_limits<unsigned>::max();

/// Backends in order of preference.
constexpr std::array<Entry, 3> kBackends = {{
    {"io_uring", probe_uring, make_uring_transport, kAnyDepth, true},
    {"threads", probe_threads, make_threads, kMaxThreads, true},
    {"null", probe_null, make_null, kAnyDepth, false},
}};

/// Whether the comma-separated list BALLAST_IO_DISABLE contains `name`.
bool disabled(std::string_view name) {
  const char* const value = std::getenv("BALLAST_IO_DISABLE");
  const std::string list = fmt::format(",{},", value == nullptr ? "" : value);
  return list.find(fmt::format(",{},", name)) != std::string::npos;
}

Backend probe(const Entry& entry) {
  Backend backend{.name = std::string(entry.name),
                  .usable = false,
                  .moves_data = entry.moves_data,
                  .reason = {}};
  if (disabled(entry.name)) {
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

std::unique_ptr<Queue> make_with(const Entry& entry, QueueOptions options,
                                 const Registration& registration) {
  options.depth = std::min(options.depth, entry.max_depth);
  return std::make_unique<BlockQueue>(std::string(entry.name), options, [&](unsigned depth) {
    return with_faults(entry.make(depth, options, registration));
  });
}

std::unique_ptr<Queue> make_first_usable(const QueueOptions& options,
                                         const Registration& registration) {
  std::string refusals;
  for (const Entry& entry : kBackends) {
    if (!entry.moves_data) continue;
    Backend backend = probe(entry);
    if (backend.usable) {
      try {
        auto queue = make_with(entry, options, registration);
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

std::unique_ptr<Queue> make_queue(const QueueOptions& options, const Registration& registration) {
  if (options.backend == "auto") return make_first_usable(options, registration);
  std::vector<std::string> names = {"auto"};
  std::string choices = "auto";
  for (const Entry& entry : kBackends) {
    if (options.backend == entry.name) {
      const Backend backend = probe(entry);
      if (backend.usable) return make_with(entry, options, registration);
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
