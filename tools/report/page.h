#pragma once

#include <filesystem>
#include <string>
#include <string_view>

#include "ballast/planning/forecast.h"
#include "ballast/text/json.h"

namespace ballast::tools {

/// A page that needs no other file and no network, and shows `data`. See page.js for its members.
std::string html_page(std::string_view title, const text::Json& data);

/// "2026-01-31 09:05 UTC"
std::string now_in_utc();

/// The page of `ballast plan --html`; `config` names the config.
std::string plan_page(const planning::Forecast& forecast, const std::filesystem::path& config);

/// Throws Error(usage) if there is a file at `path` that is not such a page, Error(io) if none can
/// be written there.
void check_page_file(const std::filesystem::path& path);
/// Writes `page` to `path`, of which a page that is there already remains until then. Throws
/// Error(io).
void write_page(const std::filesystem::path& path, const std::string& page);

}  // namespace ballast::tools
