#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tests/unit/model/net_models.h"

namespace ballast::model_net {

/// Names of the forms in which the passes of a model are recorded, in the order of CallLists.
const std::vector<std::string_view>& form_names();

/// The calls of all passes of one form, each pass with a title; empty if the model has none.
struct CallList {
  std::string_view form;
  std::vector<std::string> lines;
};
/// Runs all passes of `model` with operations that only write down their calls.
std::vector<CallList> record_calls(const RecordedModel& model);

}  // namespace ballast::model_net
