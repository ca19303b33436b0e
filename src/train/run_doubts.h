#pragma once

#include <string>
#include <vector>

#include "ballast/config/config.h"

#include "src/data/training_data.h"

namespace ballast::train {

/// Finds settings and data that work but are probably not intended. Returns one line for each, with
/// the key to change. Reads no weights, and at most the config.json next to them.
std::vector<std::string> find_doubts(const config::Config& config, const data::TrainingData& data);

/// Logs find_doubts() as warnings.
void warn_of_doubts(const config::Config& config, const data::TrainingData& data);

}  // namespace ballast::train
