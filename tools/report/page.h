#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "ballast/planner/forecast.h"
#include "ballast/text/json.h"
#include "ballast/text/output_file.h"

namespace ballast::tools {

/// Returns a page that shows `data` and needs no other file and no network. See page.js for the
/// members of `data`.
std::string html_page(std::string_view title, const text::Json& data);

/// "2026-01-31 09:05 UTC"
std::string now_in_utc();

/// The page of `ballast plan --html`; `config` names the config.
std::string plan_page(const planner::Forecast& forecast, const std::filesystem::path& config);

/// The rule for pages: newer ones replace them.
text::OutputRule page_rule(bool overwrite, std::vector<std::filesystem::path> inputs = {});

}  // namespace ballast::tools
