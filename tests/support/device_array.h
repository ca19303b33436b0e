#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>
#include <vector>

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include "ballast/device/device.h"

namespace ballast::test {

inline void must(cudaError_t code) {
  if (code != cudaSuccess) throw std::runtime_error(cudaGetErrorString(code));
}

/// An array of exactly this size in the memory of a GPU or of a fake one. Kernels are enqueued on
/// the default stream (nullptr).
template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(const std::vector<T>& values) : size_(values.size()) {
    must(cudaMalloc(&memory_, bytes()));
    set(values);
  }
  explicit DeviceArray(std::size_t size, T value = {}) : DeviceArray(std::vector<T>(size, value)) {}
  ~DeviceArray() { cudaFree(memory_); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  [[nodiscard]] T* data() const { return static_cast<T*>(memory_); }
  [[nodiscard]] std::size_t size() const { return size_; }
  void set(const std::vector<T>& values) {
    if (values.size() != size_) throw std::runtime_error("another size");
    must(cudaMemcpyAsync(memory_, values.data(), bytes(), cudaMemcpyHostToDevice, nullptr));
    must(cudaStreamSynchronize(nullptr));
  }
  /// The content after all enqueued work is done.
  [[nodiscard]] std::vector<T> get() const {
    std::vector<T> values(size_);
    must(cudaMemcpyAsync(values.data(), memory_, bytes(), cudaMemcpyDeviceToHost, nullptr));
    must(cudaStreamSynchronize(nullptr));
    return values;
  }

 private:
  [[nodiscard]] std::size_t bytes() const { return size_ * sizeof(T); }
  std::size_t size_;
  void* memory_ = nullptr;
};

/// Tests of kernels: on a GPU, or compiled for the host (tests/support/emulation), where their
/// threads run in several orders.
class Kernels : public testing::Test {
 protected:
  void SetUp() override {
    if (const std::string refusal = device::cuda_refusal(); !refusal.empty()) {
      GTEST_SKIP() << refusal;
    }
  }
};

}  // namespace ballast::test
