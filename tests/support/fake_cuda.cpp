#include "tests/support/fake_cuda.h"

#include <cstdlib>
#include <cstring>

#include <cuda_runtime_api.h>

namespace {

constexpr int kDevices = 4;
constexpr std::size_t kMemory = std::size_t{1} << 33U;

thread_local cudaError_t last_error = cudaSuccess;
thread_local int current_device = 0;

/// The runtime remembers failures until it is asked.
cudaError_t remembered(cudaError_t code) {
  if (code != cudaSuccess) last_error = code;
  return code;
}

}  // namespace

cudaError_t cudaGetLastError() {
  const cudaError_t code = last_error;
  last_error = cudaSuccess;
  return code;
}
const char* cudaGetErrorString(cudaError_t) {
  return "a fake's error";
}
const char* cudaGetErrorName(cudaError_t) {
  return "cudaErrorFake";
}

cudaError_t cudaGetDeviceCount(int* count) {
  *count = kDevices;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= kDevices) return remembered(cudaErrorInvalidDevice);
  current_device = device;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}
cudaError_t cudaSetDeviceFlags(unsigned) {
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  *properties = {};
  std::strcpy(properties->name, "Fake GPU");
  properties->major = 9;
  properties->totalGlobalMem = kMemory;
  properties->uuid.bytes[0] = static_cast<char>(1 + device);
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  *free = *total = kMemory;
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** memory, std::size_t size) {
  *memory = size > ballast::test::FakeCuda::most_at_once ? nullptr : std::calloc(size, 1);
  return *memory == nullptr ? remembered(cudaErrorMemoryAllocation) : cudaSuccess;
}
cudaError_t cudaFree(void* memory) {
  std::free(memory);
  return cudaSuccess;
}
cudaError_t cudaMemset(void* memory, int value, std::size_t size) {
  // Memory comes zeroed, and untouched pages cost nothing.
  if (value != 0) std::memset(memory, value, size);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* memory, int value, std::size_t size, cudaStream_t) {
  std::memset(memory, value, size);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t size, cudaMemcpyKind,
                            cudaStream_t) {
  if (size > 0) std::memcpy(to, from, size);  // either may be null else
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = static_cast<cudaStream_t>(std::malloc(1));
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  std::free(stream);
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) {
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t) {
  auto& busy = ballast::test::FakeCuda::busy_queries;
  return busy > 0 && busy-- > 0 ? remembered(cudaErrorNotReady) : cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) {
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = static_cast<cudaEvent_t>(std::malloc(1));
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  std::free(event);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) {
  return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t) {
  return cudaSuccess;
}
