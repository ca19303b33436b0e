// One rank of a run in which other ranks fail. comm_faults_test.py starts it under mpirun, once per
// kind of failure, and checks messages and exit status.
#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <exception>
#include <map>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <mpi.h>

#include "ballast/comm/communicator.h"
#include "ballast/core/error.h"

#include "tests/support/report_errors.h"

namespace ballast::comm {
namespace {

using namespace std::chrono_literals;

std::atomic<bool> interrupted = false;

void sleep_until_ended() {
  std::this_thread::sleep_for(600s);
}

/// Runs a collective on a channel; throws its error.
void all_reduce(Ranks& ranks) {
  const auto device = device::make_device({.kind = "host", .budget = kMiB, .compute_threads = 1});
  const auto stream = device->make_stream("reduce");
  const auto channel = ranks.make_communicator(*device);
  const DeviceBytes data = device->allocate(8 * kPage, "data");
  const DeviceBytes scratch = device->allocate(ranks.world() * kPage, "scratch");
  if (ranks.rank() == 1) sleep_until_ended();
  channel->all_reduce(*stream, data, DType::f32, scratch);
  stream->synchronize();
}

/// Starts a collective on each of two channels of a GPU, on separate threads. `crossed`: rank 1
/// starts them in the other order.
void start_two(Ranks& ranks, bool crossed) {
  const auto device = device::make_device(
      {.kind = "cuda", .budget = kMiB, .local_rank = ranks.launch().local_rank});
  const std::array streams = {device->make_stream("first"), device->make_stream("second")};
  const std::array channels = {ranks.make_communicator(*device), ranks.make_communicator(*device)};
  const DeviceBytes whole = device->allocate(2 * ranks.world() * kPage, "whole");
  const auto gather = [&](std::size_t number) {
    const Bytes size = ranks.world() * kPage;
    const DeviceBytes part = whole.subview(number * size, size);
    channels[number]->all_gather(*streams[number], part.subview(ranks.rank() * kPage, kPage), part);
    streams[number]->synchronize();
  };
  const std::size_t first = crossed && ranks.rank() == 1 ? 1 : 0;
  std::exception_ptr failure;
  std::thread other([&] {
    try {
      gather(first);
    } catch (...) {
      failure = std::current_exception();
    }
  });
  std::this_thread::sleep_for(200ms);
  try {
    gather(1 - first);
  } catch (const Error&) {
    // The other one fails too.
  }
  other.join();
  if (failure) std::rethrow_exception(failure);
  ranks.barrier();
}

/// Starts a collective on a GPU for which rank 1 never comes.
void start_alone(Ranks& ranks, const std::string& collective) {
  const auto device = device::make_device(
      {.kind = "cuda", .budget = kMiB, .local_rank = ranks.launch().local_rank});
  const auto stream = device->make_stream("alone");
  const auto event = device->make_event();
  const auto channel = ranks.make_communicator(*device);
  const DeviceBytes whole = device->allocate(ranks.world() * kPage, "whole");
  const DeviceBytes part = device->allocate(kPage, "part");
  const DeviceBytes scratch = device->allocate(ranks.world() * kPage, "scratch");
  const std::vector<Bytes> parts(ranks.world(), kPage);
  if (ranks.rank() == 1) sleep_until_ended();
  if (collective == "all_gather") channel->all_gather(*stream, part, whole);
  if (collective == "reduce_scatter") {
    channel->reduce_scatter(*stream, whole, part, DType::f32, scratch);
  }
  if (collective == "all_reduce") channel->all_reduce(*stream, whole, DType::f32, scratch);
  if (collective == "all_to_all") channel->all_to_all(*stream, whole, parts, scratch, parts);
  if (collective == "broadcast") channel->broadcast(*stream, whole, 1);
  event->record(*stream);
  event->synchronize();
}

std::unique_ptr<Ranks> join(double timeout_seconds) {
  return join_ranks(read_launch(),
                    {.timeout_seconds = timeout_seconds, .interrupted = &interrupted});
}

void timeout() {
  const auto ranks = join(0.5);
  all_reduce(*ranks);
}

/// Checks that the program survives the failure and can make further calls.
void after_timeout() {
  const auto ranks = join(0.5);
  try {
    all_reduce(*ranks);
  } catch (const Error&) {
    ranks->barrier();
  }
}

void host_timeout() {
  const auto ranks = join(0.5);
  if (ranks->rank() == 1) sleep_until_ended();
  ranks->barrier();
}

void two_channels() {
  start_two(*join(60.0), false);
}

void crossed_channels() {
  start_two(*join(0.5), true);
}

void interrupt() {
  const auto ranks = join(600.0);
  std::thread([] {
    std::this_thread::sleep_for(200ms);
    interrupted = true;
  }).detach();
  all_reduce(*ranks);
}

void abort_one() {
  const auto ranks = join(600.0);
  if (ranks->rank() == 1) {
    std::printf("rank 1 said why");  // no end of line, so it is still in the buffer
    ranks->abort(3);
  }
  ranks->barrier();
}

void throw_one() {
  const auto ranks = join(600.0);
  if (ranks->rank() == 1) throw std::runtime_error("rank 1 threw");
  ranks->barrier();
}

void kill_one() {
  const auto ranks = join(600.0);
  if (ranks->rank() == 1) std::raise(SIGKILL);
  ranks->barrier();
}

void disagree() {
  Launch launch = read_launch();
  launch.world += 1;
  join_ranks(launch, {});
}

void twice() {
  join(60.0)->barrier();
  join(60.0);
}

/// Runs one rank alone: all calls are made, and MPI does not detect anything.
void alone() {
  {
    const auto ranks = join(60.0);
    all_reduce(*ranks);
    ranks->barrier();
  }
  int started = 0;
  MPI_Initialized(&started);
  std::printf("%s, MPI started: %d\n", read_launch().launcher.c_str(), started);
}

const std::map<std::string, void (*)()> kWays = {{"timeout", timeout},
                                                 {"after_timeout", after_timeout},
                                                 {"host_timeout", host_timeout},
                                                 {"interrupt", interrupt},
                                                 {"two_channels", two_channels},
                                                 {"crossed_channels", crossed_channels},
                                                 {"abort", abort_one},
                                                 {"throw", throw_one},
                                                 {"kill", kill_one},
                                                 {"disagree", disagree},
                                                 {"twice", twice},
                                                 {"alone", alone}};

}  // namespace
}  // namespace ballast::comm

int main(int, char** argv) {
  const std::string way = argv[1];
  return ballast::test::report_errors([&way] {
    if (const std::string alone = "alone_in_"; way.starts_with(alone)) {
      ballast::comm::start_alone(*ballast::comm::join(0.5), way.substr(alone.size()));
    } else {
      ballast::comm::kWays.at(way)();
    }
  });
}
