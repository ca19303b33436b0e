#include <atomic>
#include <future>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/core/error.h"
#include "ballast/engine/snapshot.h"

namespace ballast::engine::background_save_test {
namespace {

TEST(BackgroundSave, AWriterWaitsForItsBufferOnly) {
  std::promise<void> go_on;
  std::vector<std::string> calls;
  BackgroundSave save({{3, [&] { calls.emplace_back("3"); }},
                       {1,
                        [&] {
                          go_on.get_future().wait();
                          calls.emplace_back("1");
                        }},
                       {2, [&] { calls.emplace_back("2"); }}},
                      [&] { calls.emplace_back("end"); });
  save.before_write(3);
  save.before_write(7);  // not a part
  EXPECT_FALSE(save.done());
  auto writer = std::async(std::launch::async, [&] { save.before_write(2); });
  EXPECT_EQ(writer.wait_for(std::chrono::milliseconds(20)), std::future_status::timeout);
  go_on.set_value();
  writer.get();
  save.finish();
  EXPECT_TRUE(save.done());
  EXPECT_EQ(calls, (std::vector<std::string>{"3", "1", "2", "end"}));
}

TEST(BackgroundSave, AfterAnErrorNoWriterWaits) {
  std::atomic<int> others = 0;
  BackgroundSave save(
      {{1, [] { throw Error(ErrorCategory::io, "the disk is full"); }}, {2, [&] { ++others; }}},
      [&] { ++others; });
  save.before_write(2);
  try {
    save.finish();
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(std::string(error.what()), "the disk is full");
  }
  EXPECT_EQ(others, 0);
}

TEST(BackgroundSave, ACancelledOneEndsAfterTheCurrentPart) {
  std::promise<void> begun;
  std::promise<void> go_on;
  std::atomic<int> others = 0;
  BackgroundSave save({{1,
                        [&] {
                          begun.set_value();
                          go_on.get_future().wait();
                        }},
                       {2, [&] { ++others; }}},
                      [&] { ++others; });
  begun.get_future().wait();
  auto writer = std::async(std::launch::async, [&] { save.before_write(2); });
  auto ending = std::async(std::launch::async, [&] { save.cancel(); });
  EXPECT_EQ(ending.wait_for(std::chrono::milliseconds(20)), std::future_status::timeout);
  go_on.set_value();
  ending.get();
  writer.get();
  EXPECT_EQ(others, 0);
  EXPECT_THROW(save.finish(), Error);
}

}  // namespace
}  // namespace ballast::engine::background_save_test
