#include <cerrno>
#include <filesystem>
#include <fstream>

#include <gtest/gtest.h>
#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "ballast/core/memory.h"

#include "src/device/implementations.h"
#include "tests/support/temp_dir.h"

namespace ballast::device::numa_test {
namespace {

TEST(NumaNode, IsReadFromThePciDevice) {
  const test::TempDir devices;
  const auto say = [&](const std::string& address, const std::string& text) {
    std::filesystem::create_directory(devices.path() / address);
    std::ofstream(devices.path() / address / "numa_node") << text;
  };
  say("0000:3b:00.0", "1\n");
  say("0000:5e:00.0", "-1\n");
  say("0000:af:00.0", "none\n");
  EXPECT_EQ(numa_node_of("0000:3B:00.0", devices.path()), 1);
  EXPECT_EQ(numa_node_of("0000:3b:00.0", devices.path()), 1);
  EXPECT_EQ(numa_node_of("0000:5E:00.0", devices.path()), -1);
  EXPECT_EQ(numa_node_of("0000:AF:00.0", devices.path()), -1);
  EXPECT_EQ(numa_node_of("0000:FF:00.0", devices.path()), -1);
}

TEST(NumaNode, IsPreferredForPagesToCome) {
  const Mapping mapping(4 * kPage, "test");
  const HostBytes inner = mapping.bytes().subspan(kPage, 2 * kPage);
  if (!prefer_numa_node(inner, 0)) GTEST_SKIP() << "this kernel has no memory policies for us";
  const auto policy_at = [](const std::byte* address) {
    int mode = -1;
    unsigned long nodes[16] = {};
    EXPECT_EQ(syscall(SYS_get_mempolicy, &mode, nodes, 16 * sizeof(unsigned long) * 8, address,
                      MPOL_F_ADDR),
              0);
    return mode == MPOL_PREFERRED && nodes[0] == 1;
  };
  EXPECT_TRUE(policy_at(inner.data()));
  EXPECT_TRUE(policy_at(inner.data() + inner.size() - 1));
  EXPECT_FALSE(policy_at(mapping.bytes().data()));
}

TEST(NumaNode, ThatCannotBeIsRefused) {
  const Mapping mapping(kPage, "test");
  EXPECT_FALSE(prefer_numa_node(mapping.bytes(), -1));
  EXPECT_FALSE(prefer_numa_node(mapping.bytes(), 1023));
  EXPECT_FALSE(prefer_numa_node(mapping.bytes(), 1024));
}

}  // namespace
}  // namespace ballast::device::numa_test
