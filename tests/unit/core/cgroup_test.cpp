#include <cmath>

#include <gtest/gtest.h>

#include "ballast/core/machine.h"

#include "tests/support/temp_dir.h"

namespace ballast::cgroup_test {
namespace {

constexpr Bytes kNoLimit = std::numeric_limits<Bytes>::max();

class Cgroup : public ::testing::Test {
 protected:
  void write(const std::string& file, const std::string& text) { dir_.write(file, text + "\n"); }
  [[nodiscard]] CgroupLimits limits() const { return read_cgroup_limits(dir_.path().native()); }

 private:
  test::TempDir dir_;
};

TEST_F(Cgroup, WithoutFilesNothingIsLimited) {
  EXPECT_TRUE(std::isinf(limits().cpus));
  EXPECT_EQ(limits().memory, kNoLimit);
}

TEST_F(Cgroup, UsesTheGroupOfTheProcess) {
  write("proc/self/cgroup", "0::/jobs/one");
  write("sys/fs/cgroup/jobs/one/cpu.max", "150000 100000");
  write("sys/fs/cgroup/jobs/one/memory.max", "1000");
  write("sys/fs/cgroup/jobs/one/memory.current", "400");
  write("sys/fs/cgroup/jobs/two/cpu.max", "1000 100000");
  EXPECT_EQ(limits().cpus, 1.5);
  EXPECT_EQ(limits().memory, 600U);
}

TEST_F(Cgroup, TheTightestGroupAroundItWins) {
  write("proc/self/cgroup", "0::/slice/service/leaf");
  write("sys/fs/cgroup/slice/service/leaf/cpu.max", "max 100000");
  write("sys/fs/cgroup/slice/service/cpu.max", "400000 100000");
  write("sys/fs/cgroup/slice/cpu.max", "100000 50000");
  write("sys/fs/cgroup/slice/service/leaf/memory.max", "max");
  write("sys/fs/cgroup/slice/service/leaf/memory.current", "10");
  write("sys/fs/cgroup/slice/service/memory.max", "5000");
  write("sys/fs/cgroup/slice/service/memory.current", "4900");
  write("sys/fs/cgroup/slice/memory.max", "6000");
  write("sys/fs/cgroup/slice/memory.current", "5000");
  EXPECT_EQ(limits().cpus, 2.0);
  EXPECT_EQ(limits().memory, 100U);
}

TEST_F(Cgroup, MoreThanTheLimitInUseLeavesNothing) {
  write("proc/self/cgroup", "0::/");
  write("sys/fs/cgroup/memory.max", "100");
  write("sys/fs/cgroup/memory.current", "101");
  EXPECT_EQ(limits().memory, 0U);
}

TEST_F(Cgroup, AGroupOutsideOfTheContainerLeavesTheMountedOne) {
  write("proc/self/cgroup", "0::/docker/of-the-host");
  write("sys/fs/cgroup/cpu.max", "50000 100000");
  EXPECT_EQ(limits().cpus, 0.5);
}

TEST_F(Cgroup, VersionOneHasAHierarchyPerController) {
  write("proc/self/cgroup", "7:memory:/m/own\n4:cpu,cpuacct:/c/own\n2:cpuset:/s\n0::/v2");
  write("sys/fs/cgroup/cpu/c/own/cpu.cfs_quota_us", "-1");
  write("sys/fs/cgroup/cpu/c/own/cpu.cfs_period_us", "100000");
  write("sys/fs/cgroup/cpu/c/cpu.cfs_quota_us", "300000");
  write("sys/fs/cgroup/cpu/c/cpu.cfs_period_us", "100000");
  write("sys/fs/cgroup/memory/m/own/memory.limit_in_bytes", "2048");
  write("sys/fs/cgroup/memory/m/own/memory.usage_in_bytes", "1024");
  write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712");
  write("sys/fs/cgroup/memory/memory.usage_in_bytes", "5000");
  EXPECT_EQ(limits().cpus, 3.0);
  EXPECT_EQ(limits().memory, 1024U);
}

/// Reading large files fills the group with their pages, as downloads and data sets do.
TEST_F(Cgroup, CachedPagesOfFilesAreAvailable) {
  write("proc/self/cgroup", "0::/job");
  write("sys/fs/cgroup/job/memory.max", "1000");
  write("sys/fs/cgroup/job/memory.current", "990");
  EXPECT_EQ(limits().memory, 10U);
  // All of the cache is "file", but shared memory and locked pages cannot be reclaimed.
  write("sys/fs/cgroup/job/memory.stat",
        "anon 90\nfile 900\nshmem 200\nfile_mapped 10\nfile_dirty 60\nfile_writeback 40\n"
        "inactive_anon 150\nactive_anon 140\ninactive_file 400\nactive_file 250\n"
        "unevictable 50");
  EXPECT_EQ(limits().memory, 10U + 650U - 100U);
}

TEST_F(Cgroup, CachedPagesAreThoseOfGroupsInsideToo) {
  write("proc/self/cgroup", "7:memory:/m/own");
  write("sys/fs/cgroup/memory/m/memory.limit_in_bytes", "1000");
  write("sys/fs/cgroup/memory/m/memory.usage_in_bytes", "1000");
  write("sys/fs/cgroup/memory/m/memory.stat",
        "cache 0\ninactive_file 7\nactive_file 9\ntotal_cache 800\ntotal_shmem 100\n"
        "total_dirty 30\ntotal_writeback 20\ntotal_inactive_file 600\ntotal_active_file 100\n"
        "total_unevictable 5");
  EXPECT_EQ(limits().memory, 650U);
  // The group inside has a tighter limit, and less to reclaim.
  write("sys/fs/cgroup/memory/m/own/memory.limit_in_bytes", "500");
  write("sys/fs/cgroup/memory/m/own/memory.usage_in_bytes", "450");
  write("sys/fs/cgroup/memory/m/own/memory.stat", "total_inactive_file 100\ntotal_dirty 300");
  EXPECT_EQ(limits().memory, 50U);
}

TEST_F(Cgroup, MoreCacheThanUsageLeavesTheLimit) {
  write("proc/self/cgroup", "0::/");
  write("sys/fs/cgroup/memory.max", "100");
  write("sys/fs/cgroup/memory.current", "50");
  write("sys/fs/cgroup/memory.stat", "inactive_file 80");  // read at another time
  EXPECT_EQ(limits().memory, 100U);
}

TEST_F(Cgroup, TheLimitThatThrottlesCounts) {
  write("proc/self/cgroup", "0::/");
  write("sys/fs/cgroup/memory.max", "max");
  write("sys/fs/cgroup/memory.high", "300");
  write("sys/fs/cgroup/memory.current", "100");
  EXPECT_EQ(limits().memory, 200U);
}

TEST_F(Cgroup, MalformedFilesLimitNothing) {
  write("proc/self/cgroup", "nonsense\n0::/a");
  write("sys/fs/cgroup/a/cpu.max", "100000");
  write("sys/fs/cgroup/a/memory.max", "lots");
  write("sys/fs/cgroup/a/memory.current", "1");
  write("sys/fs/cgroup/cpu.max", "100000 0");
  EXPECT_TRUE(std::isinf(limits().cpus));
  EXPECT_EQ(limits().memory, kNoLimit);
}

}  // namespace
}  // namespace ballast::cgroup_test
