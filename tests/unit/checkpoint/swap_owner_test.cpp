#include <filesystem>
#include <fstream>
#include <string>

#include <gtest/gtest.h>

#include "ballast/checkpoint/swap_files.h"

#include "src/checkpoint/checkpoint.h"
#include "src/checkpoint/kept_checkpoints.h"
#include "src/checkpoint/owner.h"
#include "tests/support/temp_dir.h"

namespace ballast::checkpoint::swap_owner_test {
namespace {

namespace fs = std::filesystem;
using State = Whereabouts::State;

constexpr const char* kId = "0123456789abcdef";

class SwapOwner : public testing::Test {
 protected:
  SwapOwner() {
    fs::create_directories(run() / kCheckpoints / "step-8");
    fs::create_directories(swap());
  }
  [[nodiscard]] fs::path run() const { return dir_.path() / "run"; }
  [[nodiscard]] fs::path swap() const { return dir_.path() / "swap"; }
  [[nodiscard]] RunOwner owner() const { return *owner_of(run()); }
  /// Writes a swap file of `owner` for a step.
  [[nodiscard]] fs::path write(const RunOwner& owner, const std::string& step = "step-8") const {
    const std::string name = swap_name_elsewhere(owner, run() / kCheckpoints / step, 0) + "-0";
    return dir_.write("swap/" + name, "states");
  }

  test::TempDir dir_;
};

TEST_F(SwapOwner, IsKeptByRenamingAndNotByCopying) {
  const RunOwner before = owner();
  fs::copy(run(), dir_.path() / "copy", fs::copy_options::recursive);
  fs::rename(run(), dir_.path() / "renamed");
  fs::rename(dir_.path() / "copy", run());
  EXPECT_TRUE(owner_of(dir_.path() / "renamed")->is_same(before));
  EXPECT_FALSE(owner_of(run())->is_same(before));
  EXPECT_EQ(owner_of(dir_.path() / "renamed")->id(), before.id());
  EXPECT_NE(owner_of(run())->id(), before.id());
  EXPECT_FALSE(owner_of(dir_.path() / "missing"));
}

TEST_F(SwapOwner, ADeviceWithAnotherNumberNeedsTheSamePath) {
  const RunOwner now = owner();
  RunOwner before = now;
  ++before.device;
  EXPECT_TRUE(now.is_same(before));
  before.path = dir_.path() / "other";  // a snapshot of the file system
  EXPECT_FALSE(now.is_same(before));
}

TEST_F(SwapOwner, IsWrittenAsJson) {
  const text::Json json = json_of(owner());
  EXPECT_EQ(json_of(*owner_from(json)).compact(), json.compact());
  EXPECT_FALSE(owner_from(text::Json()));
  for (const char* key : {"path", "device", "inode", "birth"}) {
    text::Json damaged = json;
    damaged[key] = text::Json();
    EXPECT_FALSE(owner_from(damaged)) << key;
  }
}

TEST_F(SwapOwner, NamesAreReadBack) {
  const fs::path file = write(owner());
  const auto name = parse_swap_name(file.filename().string());
  ASSERT_TRUE(name);
  EXPECT_EQ(name->id, owner().id());
  EXPECT_EQ(name->step, 8U);
  EXPECT_EQ(name->rank, 0U);
  const std::string start = "ballast-run-" + std::string(kId);
  for (const std::string& other :
       {start + "-step-8-rank-0.swap-0x", start + "-step-8-rank-0.swap-", start + "-step--rank-0",
        start + ".json", "ballast-" + std::string(kId) + "-rank-0.swap-0", std::string("x")}) {
    EXPECT_FALSE(parse_swap_name(other)) << other;
  }
  EXPECT_TRUE(is_old_swap_name("ballast-" + std::string(kId) + "-rank-0.swap-0"));
  EXPECT_FALSE(is_old_swap_name(file.filename().string()));
  EXPECT_EQ(record_id(start + ".json"), kId);
  EXPECT_EQ(record_id(start + ".json~"), "");
  EXPECT_EQ(step_in_name("damaged-step-12-2"), 12U);
  EXPECT_EQ(step_in_name(".incomplete-step-7"), 7U);
  EXPECT_EQ(step_in_name("weights"), std::nullopt);
}

TEST_F(SwapOwner, OnlyAProofMakesAFileOwned) {
  EXPECT_TRUE(is_owned(write(owner()), owner()));
  RunOwner other = owner();
  ++other.inode;
  EXPECT_FALSE(is_owned(write(other), owner()));
  EXPECT_FALSE(
      is_owned(dir_.write("swap/ballast-" + std::string(kId) + "-rank-0.swap-0", "old"), owner()));
  // The device had another number when the file was named.
  RunOwner before = owner();
  ++before.device;
  const fs::path file = write(before);
  EXPECT_FALSE(is_owned(file, owner()));
  record_owner(swap(), before);
  EXPECT_TRUE(is_owned(file, owner()));
  std::ofstream(owner_record(swap(), before.id())) << "{}";
  EXPECT_FALSE(is_owned(file, owner()));
  const fs::path link = write(owner(), "step-9");
  fs::remove(link);
  fs::create_symlink(file, link);
  EXPECT_FALSE(is_owned(link, owner()));
}

TEST_F(SwapOwner, OtherNamesForbidWriting) {
  engine::KeptStates kept;
  kept.image.files = {write(owner())};
  EXPECT_TRUE(may_write_to(kept, run()));
  fs::create_hard_link(kept.image.files[0], write(owner(), "step-4") += "0");
  EXPECT_TRUE(may_write_to(kept, run()));
  fs::create_hard_link(kept.image.files[0], swap() / "backup");
  EXPECT_FALSE(may_write_to(kept, run()));
  const fs::path inside =
      dir_.write("run/" + std::string(kCheckpoints) + "/step-8/rank-0.swap-0", "states");
  kept.image.files = {inside};
  EXPECT_TRUE(may_write_to(kept, run()));
  fs::create_directories(run() / kCheckpoints / "step-4");
  fs::create_hard_link(inside, run() / kCheckpoints / "step-4" / "rank-0.swap-0");
  EXPECT_TRUE(may_write_to(kept, run()));
  fs::create_hard_link(inside, dir_.path() / "backup");
  EXPECT_FALSE(may_write_to(kept, run()));
}

TEST_F(SwapOwner, LeftNamesAreRemoved) {
  const fs::path kept = write(owner());
  const fs::path left = write(owner(), "step-9");
  RunOwner other = owner();
  ++other.inode;
  const fs::path foreign = write(other, "step-9");
  remove_left_names(run(), swap());
  EXPECT_TRUE(fs::exists(kept));
  EXPECT_FALSE(fs::exists(left));
  EXPECT_TRUE(fs::exists(foreign));
}

TEST_F(SwapOwner, IsFoundOrGoneOrUnknown) {
  const RunOwner before = owner();
  EXPECT_EQ(find_owner(before).state, State::there);
  RunOwner unmounted = before;
  unmounted.device += 1000;
  unmounted.path = dir_.path() / "mount/run";
  unmounted.parent.clear();
  EXPECT_EQ(find_owner(unmounted).state, State::unknown);
  fs::rename(run(), dir_.path() / "renamed");
  const Whereabouts found = find_owner(before);  // only root finds it
  if (found.state == State::there) {
    EXPECT_EQ(found.path, dir_.path() / "renamed");
  } else {
    EXPECT_EQ(found.state, State::gone);
  }
  fs::remove_all(dir_.path() / "renamed");
  EXPECT_EQ(find_owner(before).state, State::gone);
}

TEST_F(SwapOwner, FilesOfDeletedRunsAreListedAndRemoved) {
  record_owner(swap(), owner());
  const fs::path file = write(owner());
  const auto only = [&] {
    const auto files = list_swap_files(swap());
    EXPECT_EQ(files.size(), 1U);
    return files.at(0);
  };
  EXPECT_EQ(only().use, SwapUse::leftover);
  fs::remove_all(run());
  EXPECT_EQ(only().use, SwapUse::unowned);
  {
    std::ifstream reading(file);  // a reader has no lock
    EXPECT_EQ(remove_unowned(swap(), {only()}).size(), 1U);
  }
  EXPECT_TRUE(fs::is_empty(swap()));
}

}  // namespace
}  // namespace ballast::checkpoint::swap_owner_test
