#pragma once

#include <string>

#include "tools/report/metrics_log.h"

namespace ballast::tools {

/// The rows as a table (RFC 4180): a line with the names of the columns, such as
/// "lanes.compute.busy_seconds", then one for each step. Numbers read back bit for bit; what is
/// missing is empty, what is not finite "nan".
std::string csv_of(const MetricsLog& log);

}  // namespace ballast::tools
