#include "tools/report/csv.h"

#include <cmath>
#include <vector>

#include <fmt/format.h>

#include "ballast/text/json.h"

namespace ballast::tools {

std::string csv_of(const MetricsLog& log) {
  std::string text = "step";
  std::vector<MetricsLog::Column> columns;
  for (const std::string& key : log.keys()) {
    if (key == "step") continue;
    text += "," + key;
    columns.push_back(log.column(key));
  }
  text += "\n";
  for (std::size_t i = 0; i < log.rows(); ++i) {
    text += std::to_string(log.steps()[i]);
    for (const MetricsLog::Column& column : columns) {
      text += ",";
      if (std::isinf(column[i])) text += "nan";
      if (std::isfinite(column[i])) text += text::Json(column[i]).compact();
    }
    text += "\n";
  }
  return text;
}

}  // namespace ballast::tools
