#pragma once

#include <string>
#include <vector>

namespace ballast::config {

/// A key of a config, as its path leads to it.
struct KeyInfo {
  std::string path;                      ///< "zero_optimization.offload_param.device"
  std::vector<std::string> values;       ///< if only these are accepted
  std::vector<std::string> other_names;  ///< that other programs use for its last part
  bool names_paths = false;              ///< a file, a folder or a list of them
};

/// All keys that configs have, in the order of `train --print-config`, without DeepSpeed's keys
/// that have no effect. Keys of one optimizer or one family are included.
std::vector<KeyInfo> key_list();

}  // namespace ballast::config
