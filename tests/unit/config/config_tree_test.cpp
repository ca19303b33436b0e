#include <algorithm>

#include <gtest/gtest.h>

#include "ballast/config/key_effects.h"

#include "tests/support/temp_dir.h"
#include "tests/unit/config/samples.h"

namespace ballast::config::document_test {
namespace {

using test::error_of;
using test::kMinimal;
using test::parse_text;
using test::with;

void expect_in(const std::string& message, const std::string& part) {
  EXPECT_NE(message.find(part), std::string::npos) << message << "\nlacks: " << part;
}

TEST(ConfigSyntax, NamesFileLineColumnAndWhatWasFound) {
  const std::string message = error_of("{\n  \"model\": {\n    \"family\": gpt2\n  }\n}");
  EXPECT_EQ(message.rfind("c.json:3:", 0), 0U) << message;
  expect_in(message, "not valid JSON: invalid literal; last read: '\"family\": g'");
  EXPECT_EQ(message.find('\n'), std::string::npos);
}

TEST(ConfigSyntax, CountsColumnsInCharacters) {
  const std::string message = error_of("{\"\xC3\xA9\xC3\xA9\": ]}");
  EXPECT_EQ(message.rfind("c.json:1:8: ", 0), 0U) << message;
}

TEST(ConfigSyntax, HintsAtACommaTooMany) {
  expect_in(error_of("{\"steps_per_print\": 1,\n}"), "an extra comma");
  EXPECT_EQ(error_of("{\"steps_per_print\": }").find("an extra comma"), std::string::npos);
}

TEST(ConfigSyntax, SaysThatANumberIsOutOfRange) {
  expect_in(error_of("{\n\"gradient_clipping\": 1e999}"), "c.json:2:26: ");
  expect_in(error_of("{\n\"gradient_clipping\": 1e999}"), "number overflow");
}

TEST(ConfigSyntax, AcceptsCommentsAndAByteOrderMark) {
  EXPECT_EQ(error_of("\xEF\xBB\xBF// one\n/* two */" + kMinimal), "");
}

TEST(ConfigSyntax, RefusesAKeyGivenTwiceAtAnyDepth) {
  EXPECT_EQ(error_of(R"({"bf16": {"enabled": true, "enabled": false}})"),
            "c.json: bf16.enabled: given twice");
  EXPECT_EQ(error_of(R"({"aio": {}, "bf16": {}, "aio": {}})"), "c.json: aio: given twice");
  EXPECT_EQ(error_of(R"({"ballast": {"placement": [{}, {"blocks": 1, "blocks": 2}]}})"),
            "c.json: ballast.placement[1].blocks: given twice");
}

TEST(ConfigSyntax, SaysInOneLineWhatIsWrongWithTheWholeText) {
  EXPECT_EQ(error_of(""), "c.json: the file is empty; expected a JSON object");
  EXPECT_EQ(error_of(" \n\t"), "c.json: the file is empty; expected a JSON object");
  EXPECT_EQ(error_of("[1]"), "c.json: expected a JSON object at the top, got an array");
  EXPECT_EQ(error_of("\"x\""), "c.json: expected a JSON object at the top, got the string \"x\"");
  EXPECT_EQ(error_of("{}\n\xFF"), "c.json:2:1: not UTF-8: found byte 0xff; save the file as UTF-8");
  EXPECT_EQ(error_of("{} // \xC0\x80"),
            "c.json:1:7: not UTF-8: found byte 0xc0; save the file as UTF-8");
  expect_in(error_of("{} {}"), "c.json:1:4: not valid JSON");
  expect_in(error_of("// nothing"), "not valid JSON");
}

TEST(ConfigSyntax, RefusesDeepNesting) {
  expect_in(error_of("{\"a\":" + std::string(100000, '[')), "nested deeper than 32 levels");
}

TEST(ConfigOverride, MayHaveSpacesAroundTheEqualsSign) {
  const std::vector<std::string> spaced = {"gradient_clipping = 0.5", "optimizer.type = Lion"};
  const Config config = parse_text(kMinimal, spaced);
  EXPECT_EQ(config.gradient_clipping, 0.5);
  EXPECT_EQ(config.optimizer.type, cpu_adam::Optimizer::lion);
}

TEST(ConfigOverride, MayLeaveOutTheSection) {
  const Config c = parse_text(
      kMinimal,
      {"optimizer.type=AdamW", "lr=3e-4", "steps=7", "offload_param.device=cpu", "train=adapters",
       "adapters={\"rank\": 3, \"targets\": \"q_proj\"}", "family=llama", "overlap_comm=true"});
  EXPECT_EQ(c.optimizer.lr, 3e-4);
  EXPECT_EQ(c.ballast.steps, 7U);
  EXPECT_EQ(c.zero.parameters.tier, TierChoice(Tier::host));
  EXPECT_EQ(c.ballast.adapters->rank, 3U);
  EXPECT_EQ(c.model.family, "llama");
  expect_in(error_of(kMinimal, {"device=cpu"}),
            "c.json: --set device=cpu: several sections have 'device'; write one of "
            "ballast.device, zero_optimization.offload_optimizer.device, "
            "zero_optimization.offload_param.device");
  expect_in(error_of(kMinimal, {"lr=-1"}), "optimizer.params.lr (--set lr=-1): must be above 0");
  expect_in(error_of(kMinimal, {"quux=1"}), "quux (--set quux=1): unknown key");
  expect_in(error_of(kMinimal, {".lr=1"}), "the path has an empty part");
}

TEST(ConfigComments, AreSkippedAnywhere) {
  const std::string commented = R"({
    "_comment": "x", "//": 1, "# why": [], "comments": {"lr": 5},
    "model": {"_note": 1, "hidden_size": 64, "num_layers": 2, "num_heads": 4, "comment": "x"},
    "data": {"text": "corpus.txt", "sequence_length": 32, "//": "x"},
    "zero_optimization": {"offload_param": {"_comment": "x"}}, "fp16": {"_comment": "x"},
    "train_batch_size": 8})";
  const Config c = parse_text(commented);
  EXPECT_TRUE(c.ignored.empty());
  EXPECT_EQ(print(c), print(parse_text(kMinimal)));
  EXPECT_EQ(error_of(with(R"("-comment": "x")")), "c.json: -comment: unknown key");
}

TEST(ConfigKeys, AreListedWithTheirValues) {
  const std::vector<KeyInfo> keys = key_list();
  const auto find = [&](const std::string& path) -> const KeyInfo& {
    const auto found = std::find_if(keys.begin(), keys.end(),
                                    [&](const KeyInfo& key) { return key.path == path; });
    return found == keys.end() ? keys.front() : *found;
  };
  EXPECT_EQ(find("ballast.update").values, (std::vector<std::string>{"gated", "eager"}));
  EXPECT_EQ(find("bf16.enabled").values, (std::vector<std::string>{"true", "false"}));
  EXPECT_TRUE(find("model.path").names_paths);
  EXPECT_EQ(find("ballast.adapters.rank").path, "ballast.adapters.rank");
  EXPECT_EQ(find("zero_optimization.reduce_bucket_size").path, keys.front().path);  // a key without
                                                                                    // effect
  for (const KeyInfo& key : keys) {
    EXPECT_EQ(std::count_if(keys.begin(), keys.end(),
                            [&](const KeyInfo& other) { return other.path == key.path; }),
              1)
        << key.path;
  }
}

TEST(ConfigKeys, AreSuggestedFromOtherSections) {
  expect_in(error_of(with(R"("lr": 1)")), "did you mean 'optimizer.params.lr'?");
  expect_in(error_of(with(R"("max_steps": 1)")), "did you mean 'ballast.steps'?");
}

TEST(ConfigFile, IsReadAndItsDirectoryIsTheBaseOfPaths) {
  const test::TempDir dir;
  const auto file = dir.write("sub/c.json", kMinimal);
  const Config config = load(file, {});
  ASSERT_EQ(config.data.text.size(), 1U);
  EXPECT_EQ(config.data.text[0],
            (std::filesystem::canonical(dir.path()) / "sub/corpus.txt").string());
}

TEST(ConfigFile, SaysInOneLineWhyItCannotBeRead) {
  const test::TempDir dir;
  const auto message_of = [](const std::filesystem::path& file) -> std::string {
    try {
      load(file, {});
    } catch (const Error& error) {
      EXPECT_EQ(error.category(), ErrorCategory::config);
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(message_of(dir.path()), dir.path().string() + ": is a directory; give a config file");
  const auto missing = dir.path() / "none.json";
  EXPECT_EQ(message_of(missing),
            missing.string() + ": cannot open the config: No such file or directory");
  const auto empty = dir.write("empty.json", "");
  EXPECT_EQ(message_of(empty), empty.string() + ": the file is empty; expected a JSON object");
  const auto huge = dir.write("huge.json", std::string(2 * kMiB, ' '));
  EXPECT_EQ(message_of(huge), huge.string() + ": too long for a config file: above 1 MiB");
}

TEST(ConfigOverride, ReadsJsonOrElseAString) {
  const Config config =
      parse_text(kMinimal, {"optimizer.params.lr=0.5", "ballast.device=host", "ballast.serial=true",
                            "data.text=[\"/a\", \"b\"]", "ballast.device_bytes=2GiB"});
  EXPECT_EQ(config.optimizer.lr, 0.5);
  EXPECT_EQ(config.ballast.device, DeviceChoice::host);
  EXPECT_TRUE(config.ballast.serial);
  EXPECT_EQ(config.data.text, (std::vector<std::string>{"/a", "/base/b"}));
  EXPECT_EQ(config.ballast.device_bytes, 2 * kGiB);
}

TEST(ConfigOverride, TheLastOneWinsAndNullRestoresTheDefault) {
  EXPECT_EQ(parse_text(kMinimal, {"ballast.steps=1", "ballast.steps=2"}).ballast.steps, 2U);
  EXPECT_EQ(parse_text(with(R"("steps_per_print": 9)"), {"steps_per_print=null"}).steps_per_print,
            1U);
}

TEST(ConfigOverride, IsNamedByTheErrorsItCauses) {
  EXPECT_EQ(error_of(kMinimal, {"optimizer.params.lr=fast"}),
            "c.json: optimizer.params.lr (--set optimizer.params.lr=fast): expected a number, got "
            "the string \"fast\"");
  EXPECT_EQ(
      error_of(kMinimal, {"optimizr.params.lr=1"}),
      "c.json: optimizr (--set optimizr.params.lr=1): unknown key (did you mean 'optimizer'?)");
  EXPECT_EQ(error_of(kMinimal, {"train_batch_size.x=1"}),
            "c.json: --set train_batch_size.x=1: 'train_batch_size' is 8, not a section");
  EXPECT_EQ(error_of(kMinimal, {"lr"}),
            "c.json: --set lr: expected path=value, such as optimizer.params.lr=3e-4");
  for (const char* path : {"=1", ".a=1", "a.=1", "aio..queue_depth=1"}) {
    EXPECT_EQ(error_of(kMinimal, {path}),
              std::string("c.json: --set ") + path + ": the path has an empty part");
  }
  EXPECT_EQ(error_of(kMinimal, {"bf16={\"enabled\": true, \"enabled\": true}"}),
            "c.json: --set bf16={\"enabled\": true, \"enabled\": true}: enabled: given twice");
  EXPECT_EQ(error_of(kMinimal, {"ballast.out=\xFF"}), "c.json: --set: not UTF-8");
}

}  // namespace
}  // namespace ballast::config::document_test
