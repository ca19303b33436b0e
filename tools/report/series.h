#pragma once

#include <cstddef>
#include <cstdint>
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
/// `busy_seconds`, `stalled_seconds` and `bytes`. `devices` has an object for each device of a run
/// with several, with `busy_seconds` below the name of each lane that devices have.
text::Json means_json(const MetricsLog& log, std::size_t groups);

/// The number of devices of the run. Rows have entries of each device only if there are several.
std::uint32_t device_count(const MetricsLog& log);

/// The median of a column's finite entries, 0 if it has none.
double median_of(const MetricsLog& log, const std::string& key);

}  // namespace ballast::tools
