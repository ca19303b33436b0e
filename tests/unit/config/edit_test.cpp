#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <sys/stat.h>

#include "ballast/config/config.h"
#include "ballast/core/error.h"

#include "tests/support/temp_dir.h"
#include "tests/unit/config/samples.h"

namespace ballast::config::edit_test {
namespace {

using test::kMinimal;
using test::samples;
using test::TempDir;

std::string edited(const std::string& text, const std::string& path, const std::string& json) {
  const Edit edit{path, json};
  return edit_text(text, {&edit, 1}, "c.json");
}

std::string read(const std::filesystem::path& file) {
  std::ifstream in(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

TEST(EditText, ReplacesAValueAndNothingElse) {
  EXPECT_EQ(edited("{ // one\n \"a\" : 1 , /* two */ \"b\":{\"c\" : [1, {\"c\": 2}]}\n}\n", "b.c",
                   "\"x\""),
            "{ // one\n \"a\" : 1 , /* two */ \"b\":{\"c\" : \"x\"}\n}\n");
  EXPECT_EQ(edited(R"({"a": -1.5e3})", "a", "7"), R"({"a": 7})");
  EXPECT_EQ(edited(R"({"a": true// why
})",
                   "a", "false"),
            R"({"a": false// why
})");
}

TEST(EditText, IgnoresMembersInsideStringsAndComments) {
  const std::string before = R"({
  // "a": 1, { [ "
  "x": "\"a\": 2, } // \\",  /* "a": 3 */
  "y": {"a": 4, "z": ["a", "}"]},
  "\u0061": )";
  EXPECT_EQ(edited(before + "5\n}", "a", "6"), before + "6\n}");
}

TEST(EditText, SetsAKeyOfASectionWhereTheTextHasIt) {
  EXPECT_EQ(edited(R"({"zero_optimization": {"aio": {"queue_depth": 8}}})", "aio.queue_depth", "4"),
            R"({"zero_optimization": {"aio": {"queue_depth": 4}}})");
  EXPECT_EQ(edited(R"({"bfloat16": {"enabled": true}})", "bf16.enabled", "false"),
            R"({"bfloat16": {"enabled": false}})");
  EXPECT_EQ(edited(R"({"aio": {}, "zero_optimization": {}})", "aio.queue_depth", "4"),
            R"({"aio": {"queue_depth": 4}, "zero_optimization": {}})");
}

TEST(EditText, ReplacesASectionThatIsNull) {
  EXPECT_EQ(edited("{\"aio\": null, \"b\": 1}", "aio.queue_depth", "4"),
            "{\"aio\": {\n  \"queue_depth\": 4\n}, \"b\": 1}");
}

TEST(EditText, AddsAMissingKeyAfterTheLastOne) {
  EXPECT_EQ(edited("{\n    \"a\": 1\n}\n", "b", "2"), "{\n    \"a\": 1,\n    \"b\": 2\n}\n");
  EXPECT_EQ(edited(R"({"a": 1})", "b", "2"), R"({"a": 1, "b": 2})");
  EXPECT_EQ(edited(R"({ "a": 1 })", "b", "2"), R"({ "a": 1, "b": 2 })");
  EXPECT_EQ(edited("{}", "b", "2"), R"({"b": 2})");
  EXPECT_EQ(edited("{\n\t\"a\": 1\n}", "b", "2"), "{\n\t\"a\": 1,\n\t\"b\": 2\n}");
  EXPECT_EQ(edited("{\"a\":\n{\"c\": 3}\n}", "a.b", "2"), "{\"a\":\n{\"c\": 3, \"b\": 2}\n}");
}

TEST(EditText, LeavesCommentsWhereTheyAre) {
  EXPECT_EQ(edited("{\n  \"a\": 1 // of /* a\n  // of nothing\n}", "b", "2"),
            "{\n  \"a\": 1, // of /* a\n  \"b\": 2\n  // of nothing\n}");
  EXPECT_EQ(edited("{\"a\": 1 /* of a */ }", "b", "2"), "{\"a\": 1, /* of a */ \"b\": 2 }");
  EXPECT_EQ(edited("{\n  // nothing\n}", "b", "2"), "{\n  // nothing\n  \"b\": 2\n}");
  EXPECT_EQ(edited("{\n  \"a\": 1 /* two\n lines */\n}", "b", "2"),
            "{\n  \"a\": 1, /* two\n lines */\n  \"b\": 2\n}");
}

TEST(EditText, KeepsTheEndsOfLines) {
  EXPECT_EQ(edited("{\r\n  \"a\": 1\r\n}\r\n", "b.c", "2"),
            "{\r\n  \"a\": 1,\r\n  \"b\": {\r\n    \"c\": 2\r\n  }\r\n}\r\n");
}

TEST(EditText, MakesMissingSectionsAndIndentsFurtherLines) {
  EXPECT_EQ(edited("{\n  \"a\": 1\n}", "b.c.d", "[\n  1,\n  2\n]"),
            "{\n  \"a\": 1,\n  \"b\": {\n    \"c\": {\n      \"d\": [\n        1,\n        2\n"
            "      ]\n    }\n  }\n}");
}

TEST(EditText, RefusesOtherTextsAndPathsThroughValues) {
  const auto message = [](const std::string& text, const std::string& path) {
    try {
      edited(text, path, "1");
    } catch (const Error& error) {
      EXPECT_EQ(error.category(), ErrorCategory::config);
      return std::string(error.what());
    }
    return std::string("no error");
  };
  EXPECT_NE(message("{\"a\": }", "a").find("c.json:1:7: not valid JSON"), std::string::npos);
  EXPECT_NE(message("[1]", "a").find("expected a JSON object"), std::string::npos);
  EXPECT_EQ(message("{\"a\": 1}", "a.b"), "c.json: a: is not a JSON object, so a.b cannot be set");
}

TEST(EditText, SetsRequestedKeysAndKeepsTheRestOfEverySample) {
  for (const std::string& text : samples()) {
    auto expected = nlohmann::json::parse(text, nullptr, true, true);
    const std::vector<Edit> edits = {{"aio.block_size", "\"256KiB\""},
                                     {"aio.queue_depth", "7"},
                                     {"zero_optimization.stage", "2"},
                                     {"aio.backend", "\"threads\""}};
    for (const Edit& edit : edits) {
      const auto dot = edit.path.find('.');
      expected[edit.path.substr(0, dot)][edit.path.substr(dot + 1)] =
          nlohmann::json::parse(edit.json);
    }
    const std::string changed = edit_text(text, edits, "c.json");
    EXPECT_EQ(nlohmann::json::parse(changed, nullptr, true, true), expected) << changed;
    // Applying it again changes nothing.
    EXPECT_EQ(edit_text(changed, edits, "c.json"), changed);
  }
}

TEST(EditFile, ReplacesTheFileAndKeepsItsMode) {
  const TempDir folder;
  const auto file = folder.write("c.json", kMinimal);
  ASSERT_EQ(chmod(file.c_str(), 0640), 0);
  const Edit edit{"aio.queue_depth", "9"};
  unsigned seen = 0;
  edit_file(file, {&edit, 1}, [&](const Config& config) { seen = config.aio.queue_depth; });
  EXPECT_EQ(seen, 9U);
  EXPECT_EQ(load(file, {}).aio.queue_depth, 9U);
  struct stat status {};
  ASSERT_EQ(stat(file.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 07777U, 0640U);
}

TEST(EditFile, EditsTheTargetOfALink) {
  const TempDir folder;
  const auto real = folder.write("real/c.json", kMinimal);
  const auto link = folder.path() / "c.json";
  std::filesystem::create_symlink("real/c.json", link);
  const Edit edit{"aio.queue_depth", "9"};
  edit_file(link, {&edit, 1}, [](const Config&) {});
  EXPECT_TRUE(std::filesystem::is_symlink(link));
  EXPECT_EQ(load(real, {}).aio.queue_depth, 9U);
}

TEST(EditFile, LeavesTheOldFileAndNothingElseWhenItFails) {
  const TempDir folder;
  const auto file = folder.write("c.json", kMinimal);
  const auto expect_untouched = [&] {
    EXPECT_EQ(read(file), kMinimal);
    const std::filesystem::directory_iterator entries(folder.path());
    EXPECT_EQ(std::distance(entries, {}), 1);
  };
  const Edit fine{"aio.queue_depth", "9"};
  EXPECT_THROW(
      edit_file(file, {&fine, 1}, [](const Config&) { throw Error(ErrorCategory::state, "no"); }),
      Error);
  expect_untouched();
  const Edit unknown{"aio.queue_dept", "9"};
  EXPECT_THROW(edit_file(file, {&unknown, 1}, [](const Config&) {}), Error);
  expect_untouched();
  EXPECT_THROW(edit_file(folder.path() / "none.json", {&fine, 1}, [](const Config&) {}), Error);
  expect_untouched();
}

}  // namespace
}  // namespace ballast::config::edit_test
