#pragma once

#include <cstddef>
#include <string>

#include "ballast/text/json.h"

#include "tools/report/metrics_log.h"

namespace ballast::tools {

/// `steps` and `values` of a column for drawing. Rows are divided into at most `groups` groups.
/// Each group keeps its least and its greatest value, and a value that is not finite (null).
/// Missing entries are left out. `rows_per_group` is 1 if all rows are kept; otherwise there is a
/// coarser line `mean`.
text::Json series_json(const MetricsLog& log, const std::string& key, std::size_t groups);

/// Means over at most `groups` groups of rows. Each has `first` and `last` step and, per step,
/// `step_seconds`, `peak_bytes` by tier (the greatest), and below the name of each lane
/// `busy_seconds`, `stalled_seconds` and `bytes`.
text::Json means_json(const MetricsLog& log, std::size_t groups);

/// The median of a column's finite entries, 0 if it has none.
double median_of(const MetricsLog& log, const std::string& key);

}  // namespace ballast::tools
