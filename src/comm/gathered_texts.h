#pragma once

#include <string>
#include <vector>

#include "ballast/comm/communicator.h"

namespace ballast::comm {

/// Returns the `text` of every rank, by rank. Collective.
std::vector<std::string> gather_texts(Ranks& ranks, const std::string& text);

}  // namespace ballast::comm
