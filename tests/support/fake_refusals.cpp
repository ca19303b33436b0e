// Refusals and complaints of the fakes of CUDA and its libraries.
#include <atomic>
#include <bit>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include <cuda_runtime_api.h>

#include "tests/support/fake_cuda.h"
#include "tests/support/fake_memory.h"

namespace ballast::test {
namespace {

/// Requests of tests to the fakes, and the calls and complaints that they noted.
struct Notes {
  std::mutex mutex;
  bool collects = false;
  std::string complaints;
  std::atomic<bool> counts = false;
  std::string refused;
  int refused_number = 0;
  std::map<std::string, int> calls;
};
Notes& notes() {
  static auto* const kept = new Notes;
  return *kept;
}

}  // namespace

void FakeCuda::complain(const std::string& what) {
  Notes& all = notes();
  const std::scoped_lock lock(all.mutex);
  if (all.collects) {
    all.complaints += what + "\n";
  } else if (seed != 0) {
    std::fprintf(stderr, "fake CUDA: %s\n", what.c_str());
    std::abort();
  }
}
FakeCuda::Complaints::Complaints() {
  const std::scoped_lock lock(notes().mutex);
  notes().collects = true;
  notes().complaints.clear();
}
FakeCuda::Complaints::~Complaints() {
  const std::scoped_lock lock(notes().mutex);
  notes().collects = false;
}
std::string FakeCuda::Complaints::text() const {
  const std::scoped_lock lock(notes().mutex);
  return notes().complaints;
}

FakeCuda::Refusal::Refusal(std::string call, int number) {
  const std::scoped_lock lock(notes().mutex);
  notes().refused = std::move(call);
  notes().refused_number = number;
  notes().calls.clear();
  notes().counts = true;
}
FakeCuda::Refusal::~Refusal() {
  notes().counts = false;
}
std::map<std::string, int> FakeCuda::Refusal::calls() const {
  const std::scoped_lock lock(notes().mutex);
  return notes().calls;
}
bool FakeCuda::refuses(const char* call) {
  Notes& all = notes();
  if (!all.counts) return false;
  const std::scoped_lock lock(all.mutex);
  const int number = all.calls[call]++;
  return call == all.refused && number == all.refused_number;
}
cudaError_t FakeCuda::answer(const char* call) {
  if (fault != cudaSuccess) return fault;
  if (*call == '\0' || !refuses(call)) return cudaSuccess;
  const bool allocates = std::string_view(call).starts_with("cudaMalloc");
  return allocates ? cudaErrorMemoryAllocation : cudaErrorUnknown;
}

std::size_t FakeCuda::taken_by_libraries() {
  return static_cast<std::size_t>(std::popcount(with_library_memory.load())) * library_memory;
}

bool FakeCuda::start_library(std::atomic<std::uint64_t>& started) {
  const std::uint64_t gpu = std::uint64_t{1} << static_cast<unsigned>(current());
  if ((started & gpu) != 0) return true;
  if (NoAllocation::exists()) {
    ++NoAllocation::refused;
    complain("the first start of a library on a GPU inside a step, which allocates memory");
    return false;
  }
  if (library_memory > 0 && (with_library_memory & gpu) == 0) {
    const std::size_t before = FakeMemory::taken() + taken_by_libraries();
    if (before + library_memory > memory) return false;
    with_library_memory |= gpu;
  }
  started |= gpu;
  return true;
}

namespace {

/// Pairs of GPUs of which the first one accesses the memory of the second one.
std::set<std::pair<int, int>>& enabled_peers() {
  static std::set<std::pair<int, int>> pairs;
  return pairs;
}
std::mutex peers_mutex;

}  // namespace

cudaError_t FakeCuda::enable_peer(int own, int peer) {
  if (!peers || peer == own) return cudaErrorInvalidDevice;
  if (peers_enabling != cudaSuccess) return peers_enabling;
  const std::scoped_lock lock(peers_mutex);
  const bool fresh = enabled_peers().emplace(own, peer).second;
  return fresh ? cudaSuccess : cudaErrorPeerAccessAlreadyEnabled;
}
cudaError_t FakeCuda::disable_peer(int own, int peer) {
  const std::scoped_lock lock(peers_mutex);
  return enabled_peers().erase({own, peer}) > 0 ? cudaSuccess : cudaErrorPeerAccessNotEnabled;
}
void FakeCuda::await_shared_memory_of_others(int call) {
  for (int i = 0; i < 5000 && shared_memory_waits_on == current(); ++i) {
    if (shared_memory_calls > call) shared_memory_waits_on = -1;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}
bool FakeCuda::loses_copies(int from, int to) {
  const std::scoped_lock lock(peers_mutex);
  return peers_lose_copies && enabled_peers().contains({from, to});
}

}  // namespace ballast::test
