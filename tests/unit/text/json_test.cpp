#include "ballast/text/json.h"

#include <bit>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "ballast/core/random.h"

namespace ballast::text::json_test {
namespace {

std::string error_of(std::string_view text, const JsonRules& rules = {}) {
  try {
    parse_json(text, "f", rules);
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), rules.category);
    return error.what();
  }
  return "";
}

TEST(Json, IsWrittenInTheOrderInWhichItWasBuilt) {
  Json json;
  json["b"] = 1;
  json["a"]["inner"] = "x\"y\n";
  json["list"] = Json::array({true, Json(), 2.0, -3});
  json["none"] = Json::array();
  json["o"] = Json::object();
  EXPECT_EQ(json.compact(),
            R"({"b":1,"a":{"inner":"x\"y\n"},"list":[true,null,2.0,-3],"none":[],"o":{}})");
  EXPECT_EQ(json.pretty(),
            "{\n  \"b\": 1,\n  \"a\": {\n    \"inner\": \"x\\\"y\\n\"\n  },\n  \"list\": [\n    "
            "true,\n    null,\n    2.0,\n    -3\n  ],\n  \"none\": [],\n  \"o\": {}\n}");
  EXPECT_EQ(Json::array({1, Json::object({{"a", 1}, {"b", 2}})}).pretty(1),
            "[\n  1,\n  {\"a\": 1, \"b\": 2}\n]");
  EXPECT_TRUE(json.erase("b"));
  EXPECT_FALSE(json.erase("b"));
  EXPECT_EQ(json.find("b"), nullptr);
}

TEST(Json, ReplacesWhatIsNotUtf8AndWhatIsNotANumber) {
  EXPECT_EQ(Json("a\xff").compact(), "\"a\xEF\xBF\xBD\"");
  EXPECT_EQ(Json(std::numeric_limits<double>::quiet_NaN()).compact(), "null");
  EXPECT_EQ(Json(-std::numeric_limits<double>::infinity()).compact(), "null");
}

TEST(Json, NumbersReadBackBitForBit) {
  for (std::uint64_t i = 0; i < 20'000; ++i) {
    const auto value = std::bit_cast<double>(random_u64(3, i));
    if (!std::isfinite(value)) continue;
    const Json read = parse_json(Json(value).compact(), "f");
    ASSERT_EQ(std::bit_cast<std::uint64_t>(read.number()), std::bit_cast<std::uint64_t>(value));
    ASSERT_EQ(Json(value).compact(), nlohmann::json(value).dump());
  }
  EXPECT_EQ(Json(std::numeric_limits<std::uint64_t>::max()).compact(), "18446744073709551615");
  EXPECT_EQ(Json(std::numeric_limits<std::int64_t>::min()).compact(), "-9223372036854775808");
}

TEST(Json, AWholeNumberHasNoSignFractionOrExponent) {
  const auto whole = [](const char* text) { return parse_json(text, "f").whole(); };
  EXPECT_EQ(whole("18446744073709551615"), std::numeric_limits<std::uint64_t>::max());
  for (const char* text : {"18446744073709551616", "-1", "-0", "1.0", "1e3", "\"1\"", "null"}) {
    EXPECT_EQ(whole(text), std::nullopt) << text;
  }
}

TEST(ParseJson, KeepsDigitsOrderAndPlaces) {
  const std::string text =
      "\xEF\xBB\xBF{ // one, \"two\": 2\n \"a\\\"b\" : 1.50e+01, \"c\": [true , {\"d\":\"\\\\\"}]}";
  const Json json = parse_json(text, "f", {.comments = true});
  const auto at = [&](const Json& value) {
    return text.substr(value.begin_at(), value.end_at() - value.begin_at());
  };
  ASSERT_EQ(json.members().size(), 2U);
  EXPECT_EQ(json.begin_at(), 3U);
  EXPECT_EQ(json.end_at(), text.size());
  EXPECT_EQ(json.members()[0].key, "a\"b");
  EXPECT_EQ(text.substr(json.members()[0].at, 6), R"("a\"b")");
  EXPECT_EQ(json.members()[0].value.text(), "1.50e+01");
  EXPECT_EQ(json.members()[0].value.number(), 15.0);
  EXPECT_EQ(at(json.members()[0].value), "1.50e+01");
  const Json& list = json.members()[1].value;
  EXPECT_EQ(at(list), R"([true , {"d":"\\"}])");
  EXPECT_TRUE(list.elements()[0].flag());
  EXPECT_EQ(at(list.elements()[0]), "true");
  EXPECT_EQ(at(*list.elements()[1].find("d")), R"("\\")");
}

TEST(ParseJson, ACommentEndsWithALineOfAnyKind) {
  const Json json =
      parse_json("{\"a\": // one\r 15, // two\r\n \"b\": 2\n}", "f", {.comments = true});
  EXPECT_EQ(json.compact(), R"({"a":15,"b":2})");
}

TEST(ParseJson, ReportsLineAndColumnOfAMistake) {
  EXPECT_EQ(error_of("{\n  \"a\": 1,\n}").rfind("f:3:1: not valid JSON", 0), 0U);
  EXPECT_NE(error_of("{\"a\": 1,}").find("an extra comma"), std::string::npos);
  EXPECT_EQ(error_of("[\n\"\xff\"]"), "f:2:2: not UTF-8: found byte 0xff; save the file as UTF-8");
  EXPECT_EQ(error_of("// c\n1").rfind("f:1:1: not valid JSON", 0), 0U);
  EXPECT_EQ(error_of("// c\n1", {.comments = true}), "");
  EXPECT_NE(error_of("").find("not valid JSON"), std::string::npos);
  EXPECT_NE(error_of("1e999").find("number overflow"), std::string::npos);
}

TEST(ParseJson, SaysWhatToWriteInsteadOfOtherSpellings) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {R"({"a": True})", "f:1:7: not valid JSON: True: write true"},
      {R"({"a": None})", "f:1:7: not valid JSON: None: write null"},
      {R"({'a': 1})", "strings have double quotes"},
      {"{\"a\": \xe2\x80\x9cx\xe2\x80\x9d}", "a typographic quotation mark; write \""},
      {"{\xc2\xa0\"a\": 1}", "a no-break space; write a plain space"},
      {R"({"b": 1, abc: 1})", R"(names have double quotes: "abc")"},
      {"# c\n{}", "f:1:1: not valid JSON: comments begin with //"},
      {R"({"a": +1})", "a number has no +"},
      {R"({"a": .5})", "a number begins with a digit"},
      {R"({"a": 1_000})", "write 1000, 0.01 or 1e-4"},
      {R"({"a": 0x10})", "write 1000, 0.01 or 1e-4"},
      {R"({"a": 01})", "write 1000, 0.01 or 1e-4"},
      {R"({"a": 0,01})", "a number has a point, not a comma"},
      {"{\"a\": \"x\n}", "has no closing quotation mark"},
      {R"({"a": 1 "b": 2})", "(is a comma missing before it?)"},
      {"{\n \"a\": [1", "(the [ of f:2:7 is not closed)"},
      {R"({"a": 1}})", "(is it one too many?)"},
      {"{}\n{}", "(the file has more than one value)"},
  };
  for (const auto& [text, message] : cases) {
    EXPECT_NE(error_of(text).find(message), std::string::npos) << text << "\n" << error_of(text);
  }
}

TEST(ParseJson, RefusesKeysGivenTwiceAndDeepNesting) {
  EXPECT_EQ(error_of(R"({"a": [0, {"k": 1, "k": 2}]})"), "f: a[1].k: given twice");
  EXPECT_EQ(error_of("[[[]]]", {.category = ErrorCategory::data, .deepest = 3}), "");
  EXPECT_EQ(error_of("[[[[]]]]", {.category = ErrorCategory::data, .deepest = 3}),
            "f: nested deeper than 3 levels");
}

TEST(ParseJson, DescribesAValueForAMessage) {
  EXPECT_EQ(parse_json("\"a\\tb\"", "f").described(), "the string \"a\\u0009b\"");
  EXPECT_EQ(parse_json("-0.50", "f").described(), "-0.50");
  EXPECT_EQ(parse_json("[1]", "f").described(), "an array");
  EXPECT_EQ(parse_json("{}", "f").described(), "an object");
  EXPECT_EQ(parse_json("null", "f").described(), "null");
  EXPECT_EQ(parse_json("true", "f").described(), "true");
}

TEST(ForEachValue, NamesValuesByTheKeysThatLeadToThem) {
  std::vector<std::string> found;
  for_each_value(parse_json(R"({"a": 1, "b": {"c": [{"d": 2}], "e": {}, "f": {"g": null}}})", "f"),
                 [&](const std::string& path, const Json& value) {
                   found.push_back(path + "=" + value.compact());
                 });
  EXPECT_EQ(found, (std::vector<std::string>{"a=1", R"(b.c=[{"d":2}])", "b.e={}", "b.f.g=null"}));
  for_each_value(Json::array({1}), [](const std::string&, const Json&) { FAIL(); });
}

TEST(ScaledNumbers, AreExactInBothDirections) {
  const auto digits = [](double value, int power) { return scaled_json(value, power).text(); };
  EXPECT_EQ(scaled_number("0.1", 9), 1e8);
  EXPECT_EQ(scaled_number("-25E-1", 0), -2.5);
  EXPECT_EQ(scaled_number("1e400", -200), 1e200);
  EXPECT_EQ(scaled_number("1e400", 0), std::numeric_limits<double>::infinity());
  EXPECT_EQ(scaled_number("1e-400", 0), 0.0);
  EXPECT_EQ(digits(1e9, 9), "1");
  EXPECT_EQ(digits(1.5e8, 9), "0.15");
  EXPECT_EQ(digits(123456.0, 0), "123456");
  EXPECT_EQ(digits(-1234.5, 0), "-1234.5");
  EXPECT_EQ(digits(3e-9, 9), "3e-18");
  EXPECT_EQ(digits(0.0, 9), "0");
}

}  // namespace
}  // namespace ballast::text::json_test
