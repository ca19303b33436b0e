#pragma once

#include <string>

namespace ballast::device {

/// A named range of this thread's time in NVIDIA's profilers (NVTX), during the object's lifetime.
/// Costs next to nothing without a profiler. Ranges of a thread are nested.
class ProfilerRange {
 public:
  explicit ProfilerRange(const std::string& name);
  ~ProfilerRange();
  ProfilerRange(const ProfilerRange&) = delete;
  ProfilerRange& operator=(const ProfilerRange&) = delete;
};

/// Returns why this program has no ranges, in one line, or "".
std::string profiler_refusal();

}  // namespace ballast::device
