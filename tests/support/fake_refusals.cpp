// Refusals and complaints of the fakes of CUDA and its libraries.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
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

bool FakeCuda::start_libraries() {
  if (libraries_started || library_memory == 0) return true;
  if (FakeMemory::taken() + library_memory > memory) return false;
  libraries_started = true;
  return true;
}

}  // namespace ballast::test
