#include "tools/io_load/producer.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <exception>
#include <filesystem>
#include <memory>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <sys/resource.h>
#include <unistd.h>

#include "ballast/core/clocks.h"
#include "ballast/core/error.h"

#include "tools/io_load/load.h"

namespace ballast::tools {

namespace {

/// Blocks that are completed and replaced together, few enough to keep the device busy.
std::size_t batch_for(unsigned depth) {
  return std::clamp<std::size_t>(depth / 4, 1, 8);
}

aio::QueueOptions queue_options(const IoLoad& load) {
  aio::QueueOptions options;
  options.backend = load.backend;
  options.block_bytes = load.block;
  options.depth = load.depth;
  options.in_flight_bytes = std::max(options.in_flight_bytes, load.buffer_bytes());
  options.sqpoll = load.sqpoll;
  options.iopoll = load.iopoll;
  return options;
}

bool reads_and_writes(IoPattern pattern) {
  return pattern == IoPattern::mixed || pattern == IoPattern::copy;
}

/// A new file next to `original`, of the same size.
aio::File make_copy(const aio::File& original) {
  const std::filesystem::path directory = original.name();
  if (!std::filesystem::is_directory(directory)) {
    return aio::File::create_in_memory(original.size());
  }
  const bool buffered = original.alignment() == 1;
  return aio::File::create_anonymous(
      directory, original.size(),
      buffered ? aio::File::Access::buffered : aio::File::Access::direct);
}

}  // namespace

IoProducer::IoProducer(const IoLoad& load, IoRegion& region, std::string task,
                       const std::atomic<bool>& interrupted, std::atomic<bool>& stop)
    : load_(load),
      region_(region),
      task_(std::move(task)),
      interrupted_(interrupted),
      stop_(stop),
      blocks_(region.file().size() / load.block),
      batch_(batch_for(load.depth)),
      slots_(std::min<std::uint64_t>(load.depth, blocks_)),
      buffers_(slots_.size() * round_up(load.block, kPage), "buffers of " + task_),
      busy_(static_cast<std::size_t>(blocks_), false) {
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    slot.memory = buffers_.bytes().subspan(i * round_up(load.block, kPage), load.block);
    region_.content().fill(slot.memory, 0);
    free_.push_back(&slot);
  }
  std::vector<const aio::File*> files = {&region_.file()};
  if (load_.pattern == IoPattern::copy) files.push_back(&copy_.emplace(make_copy(region_.file())));
  queue_ = aio::make_queue(queue_options(load_), {files, {buffers_.bytes()}});
}

bool IoProducer::stopped() const {
  return stop_.load(std::memory_order_relaxed) || interrupted_.load(std::memory_order_relaxed);
}

void IoProducer::run(Clock::time_point start) {
  try {
    while (true) {
      if (!stopped()) refill(start);
      if (outstanding_.empty()) break;
      if (stopped()) return drain();
      take_finished();
    }
    ended_ = Clock::now();
  } catch (...) {
    stop_.store(true);
    drain();
    throw;
  }
}

void IoProducer::refill(Clock::time_point start) {
  // A thread that starts late still moves one block, so that there is a rate.
  const bool time_is_up = load_.seconds && begun_ > 0 &&
                          Clock::now() - start >= std::chrono::duration<double>(*load_.seconds);
  // Starts a mix with half of the requests, so that reads and writes are balanced.
  std::size_t room = free_.size();
  if (reads_and_writes(load_.pattern) && begun_ == 0) room = (room + 1) / 2;
  requests_.clear();
  submitted_.clear();
  std::erase_if(free_, [&](Slot* slot) {
    if (submitted_.size() == room) return false;
    if (!std::exchange(slot->read_back, false)) {
      if (time_is_up || !next_block(*slot)) return false;
    } else {
      slot->direction = aio::Direction::write;
    }
    prepare(*slot);
    return true;
  });
  if (requests_.empty()) return;
  const std::vector<aio::Ticket> tickets = queue_->submit(requests_);
  for (std::size_t i = 0; i < tickets.size(); ++i) {
    submitted_[i]->ticket = tickets[i];
    outstanding_.push_back(submitted_[i]);
  }
}

/// Assigns the next free block in order; false when the pass over the region is complete.
bool IoProducer::next_block(Slot& slot) {
  if (!load_.seconds && begun_ == blocks_) return false;
  while (busy_[static_cast<std::size_t>(cursor_)]) cursor_ = (cursor_ + 1) % blocks_;
  slot.block = cursor_;
  slot.direction = load_.pattern == IoPattern::write ? aio::Direction::write : aio::Direction::read;
  busy_[static_cast<std::size_t>(cursor_)] = true;
  cursor_ = (cursor_ + 1) % blocks_;
  ++begun_;
  return true;
}

void IoProducer::prepare(Slot& slot) {
  const HostBytes bytes = slot.memory;
  const Bytes offset = slot.block * load_.block;
  if (load_.check && slot.direction == aio::Direction::write) {
    region_.content().fill_next(bytes, offset);
  }
  slot.returned.store(false, std::memory_order_relaxed);
  const auto mark = [&slot] { slot.returned.store(true, std::memory_order_release); };
  const bool copied = copy_ && slot.direction == aio::Direction::write;
  requests_.push_back(
      {slot.direction, copied ? &*copy_ : &region_.file(), offset, bytes, false, mark});
  submitted_.push_back(&slot);
}

void IoProducer::take_finished() {
  // Waiting for the last of the oldest requests completes most of a batch at once.
  Slot* const awaited = outstanding_[std::min(batch_, outstanding_.size()) - 1];
  complete(*awaited);
  std::erase_if(outstanding_, [&](Slot* slot) {
    if (slot != awaited) {
      if (!slot->returned.load(std::memory_order_acquire)) return false;
      complete(*slot);
    }
    if (!slot->read_back) busy_[static_cast<std::size_t>(slot->block)] = false;
    free_.push_back(slot);
    return true;
  });
}

void IoProducer::complete(Slot& slot) {
  const aio::Completion completion = queue_->wait(slot.ticket);
  slot.ticket = {};
  completion.check(task_);
  latencies_.push_back(static_cast<float>(completion.seconds));
  if (slot.direction == aio::Direction::write) return;
  slot.read_back = reads_and_writes(load_.pattern);
  if (!load_.check) return;
  const std::string mistake = region_.content().mistake(slot.memory, slot.block * load_.block);
  if (mistake.empty()) return;
  throw Error(ErrorCategory::io, fmt::format("{}: {}: {}", task_, region_.file().name(), mistake));
}

/// Cancels all outstanding requests and waits for them, ignoring their results.
void IoProducer::drain() {
  queue_->cancel();
  for (Slot* slot : std::exchange(outstanding_, {})) {
    const aio::Ticket ticket = std::exchange(slot->ticket, {});
    if (ticket.id != 0) static_cast<void>(queue_->wait(ticket));
  }
}

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
