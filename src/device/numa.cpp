#include "src/device/numa.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <climits>
#include <fstream>
#include <string>

#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace ballast::device {
namespace {

/// As many nodes as a kernel can be configured for.
constexpr std::size_t kNodes = 1024;
constexpr std::size_t kWordBits = sizeof(unsigned long) * CHAR_BIT;

}  // namespace

int numa_node_of(std::string_view address, const std::filesystem::path& devices) {
  std::string name(address);
  std::transform(name.begin(), name.end(), name.begin(),
                 [](unsigned char digit) { return static_cast<char>(std::tolower(digit)); });
  std::ifstream file(devices / name / "numa_node");
  int node = -1;
  return file >> node ? node : -1;
}

bool prefer_numa_node(HostBytes memory, int node) {
  if (node < 0 || static_cast<std::size_t>(node) >= kNodes) return false;
  std::array<unsigned long, kNodes / kWordBits> nodes = {};
  const auto bit = static_cast<std::size_t>(node);
  nodes[bit / kWordBits] = 1UL << (bit % kWordBits);
  // The kernel looks at one bit less than it is told.
  return syscall(SYS_mbind, memory.data(), memory.size(), MPOL_PREFERRED, nodes.data(), kNodes + 1,
                 0) == 0;
}

}  // namespace ballast::device
