#pragma once

#include <string>

#include "tools/report/metrics_log.h"

namespace ballast::tools {

/// Returns the rows as a table (RFC 4180): a line with the names of the columns, such as
/// "lanes.compute.busy_seconds", then one per step. Numbers read back bit for bit. Missing values
/// are empty, and values that are not finite are "nan".
std::string csv_of(const MetricsLog& log);

}  // namespace ballast::tools
