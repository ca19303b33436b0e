#include "tools/report/page.h"

#include <ctime>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "ballast/core/build_info.h"
#include "ballast/core/error.h"
#include "ballast/engine/blueprint.h"
#include "ballast/plan/simulator.h"

#include "tools/report/assets.h"
#include "tools/report/timeline_data.h"

namespace ballast::tools {
namespace {

using text::Json;

/// Start of each page, which distinguishes it from other files.
constexpr std::string_view kPageHead = "<!doctype html>\n<!-- A page of ballast. -->\n";

std::string escaped(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (c == '<') {
      out += "&lt;";
    } else if (c == '&') {
      out += "&amp;";
    } else {
      out += c;
    }
  }
  return out;
}

/// JSON for a script element, escaping '<', which it has only in strings.
std::string for_script(const Json& data) {
  const std::string text = data.compact();
  std::string out;
  out.reserve(text.size());
  for (const char c : text) {
    if (c == '<') {
      out += "\\u003c";
    } else {
      out += c;
    }
  }
  return out;
}

std::string script_text() {
  Json lanes = Json::array();
  for (const plan::Lane lane : plan::kDrawnLanes) lanes.push_back(to_string(lane));
  const std::string constants = fmt::format("const LANES = {};\n", lanes.compact());
  std::string text;
  for (const std::string_view part :
       {assets::kFormatJs, std::string_view(constants), assets::kChartJs, assets::kTimelineJs,
        assets::kTablesJs, assets::kBenchJs, assets::kPageJs}) {
    text += part;
  }
  return text;
}

}  // namespace

std::string now_in_utc() {
  const std::time_t now = std::time(nullptr);
  std::tm parts = {};
  gmtime_r(&now, &parts);
  return fmt::format("{:04}-{:02}-{:02} {:02}:{:02} UTC", parts.tm_year + 1900, parts.tm_mon + 1,
                     parts.tm_mday, parts.tm_hour, parts.tm_min);
}

std::string html_page(std::string_view title, const Json& data) {
  Json all = data;
  all["version"] = version();
  all["written"] = now_in_utc();
  const std::vector<std::pair<std::string_view, std::string>> parts = {
      {"@TITLE@", escaped(title)},
      {"@STYLE@", std::string(assets::kPageCss)},
      {"@DATA@", for_script(all)},
      {"@SCRIPT@", script_text()}};
  std::string page(kPageHead);
  std::string_view rest = assets::kPageHtml;
  for (const auto& [mark, text] : parts) {
    const std::size_t at = rest.find(mark);
    expects(at != std::string_view::npos, "a mark is missing in page.html, or not in its place");
    page += rest.substr(0, at);
    page += text;
    rest.remove_prefix(at + mark.size());
  }
  page += rest;
  return page;
}

std::string plan_page(const planner::Forecast& forecast, const std::filesystem::path& config) {
  const engine::Blueprint& blueprint = forecast.decision.blueprint;
  const plan::Prediction prediction =
      plan::simulate(blueprint.schedule, forecast.rates, {.timeline = true});
  Json lines = Json::array();
  for (const std::string& line : planner::describe(forecast)) lines.push_back(line);
  Json data = Json::object({{"kind", "plan"}, {"config_file", config.string()}, {"text", lines}});
  data["plan"] = text::parse_json(planner::to_json(forecast), "plan");
  if (forecast.wear) data["wear"] = planner::describe(*forecast.wear);
  data["timelines"] = Json::array({timeline_json(
      predicted_timeline(prediction.timeline, step::OperationNames(blueprint.problem)))});
  return html_page(fmt::format("Plan of {}", config.filename().string()), data);
}

text::OutputRule page_rule(bool overwrite, std::vector<std::filesystem::path> inputs) {
  return {.kind = "a page of ballast",
          .begins = std::string(kPageHead),
          .overwrite = overwrite,
          .inputs = std::move(inputs)};
}

}  // namespace ballast::tools
