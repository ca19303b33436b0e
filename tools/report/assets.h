#pragma once

#include <string_view>

/// Files of the page, made by embed.py.
namespace ballast::tools::assets {

extern const std::string_view kPageHtml;
extern const std::string_view kPageCss;
extern const std::string_view kFormatJs;
extern const std::string_view kChartJs;
extern const std::string_view kTimelineJs;
extern const std::string_view kTablesJs;
extern const std::string_view kBenchJs;
extern const std::string_view kPageJs;

}  // namespace ballast::tools::assets
