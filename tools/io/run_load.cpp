#include <algorithm>
#include <cerrno>
#include <chrono>
#include <exception>
#include <memory>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <sys/resource.h>
#include <unistd.h>

#include "ballast/core/error.h"

#include "tools/io/load.h"
#include "tools/io/producer.h"
#include "tools/quantile.h"

namespace ballast::tools {
namespace {

using Clock = IoProducer::Clock;

double seconds_of(const timeval& time) {
  return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
}

/// CPU time of the process, including the kernel's.
double cpu_seconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return seconds_of(usage.ru_utime) + seconds_of(usage.ru_stime);
}

IoResult sum(const std::vector<std::unique_ptr<IoProducer>>& producers, Clock::time_point start) {
  IoResult result;
  std::vector<float> latencies;
  for (const auto& producer : producers) {
    const aio::QueueCounters counters = producer->queue().counters();
    result.bytes_read += counters.bytes_read;
    result.bytes_written += counters.bytes_written;
    result.blocks += counters.blocks;
    result.batches += counters.batches;
    const std::chrono::duration<double> took = producer->ended() - start;
    result.seconds = std::max(result.seconds, took.count());
    latencies.insert(latencies.end(), producer->latencies().begin(), producer->latencies().end());
  }
  result.backend = producers.front()->queue().backend();
  result.median_seconds = quantile(latencies, 0.5);
  result.p99_seconds = quantile(latencies, 0.99);
  return result;
}

}  // namespace

IoResult run_load(const IoLoad& load, std::span<IoRegion> regions, std::string_view task,
                  const std::atomic<bool>& interrupted) {
  std::atomic<bool> stop = false;
  std::vector<std::unique_ptr<IoProducer>> producers;
  for (IoRegion& region : regions) {
    producers.push_back(
        std::make_unique<IoProducer>(load, region, std::string(task), interrupted, stop));
  }
  std::vector<std::exception_ptr> failures(producers.size());
  const double cpu_before = cpu_seconds();
  const auto start = Clock::now();
  std::vector<std::thread> threads;
  const auto carry_out = [&](std::size_t i) {
    try {
      producers[i]->run(start);
    } catch (...) {
      failures[i] = std::current_exception();
    }
  };
  try {
    for (std::size_t i = 0; i < producers.size(); ++i) threads.emplace_back(carry_out, i);
  } catch (const std::system_error& error) {
    stop.store(true);
    failures.back() = std::make_exception_ptr(Error(
        ErrorCategory::io, fmt::format("{}: cannot start a thread", task), error.code().value()));
  }
  for (std::thread& thread : threads) thread.join();
  const double cpu = cpu_seconds() - cpu_before;
  for (const std::exception_ptr& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
  if (interrupted.load()) throw Error(ErrorCategory::interrupted, "interrupted");
  IoResult result = sum(producers, start);
  result.cpu_seconds = cpu;
  return result;
}

void fill_regions(std::span<IoRegion> regions, const std::string& backend, std::string_view task,
                  const std::atomic<bool>& interrupted) {
  for (IoRegion& region : regions) {
    IoLoad load;
    load.pattern = IoPattern::write;
    load.backend = backend;
    load.check = true;
    run_load(load, {&region, 1}, task, interrupted);
    if (fsync(region.file().descriptor()) != 0) {
      throw Error(ErrorCategory::io, fmt::format("{}: fsync {}", task, region.file().name()),
                  errno);
    }
  }
}

void verify_regions(const IoLoad& load, std::span<IoRegion> regions, std::string_view task,
                    const std::atomic<bool>& interrupted) {
  IoLoad reading = load;
  reading.pattern = IoPattern::read;
  reading.seconds.reset();
  reading.check = true;
  run_load(reading, regions, task, interrupted);
}

}  // namespace ballast::tools
