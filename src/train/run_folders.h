#pragma once

#include <list>

#include "ballast/comm/communicator.h"
#include "ballast/config/config.h"
#include "ballast/engine/engine.h"
#include "ballast/state/swap_plan.h"

#include "src/formats/new_folder.h"

namespace ballast::train {

/// The missing swap folders of a run or an evaluation, and the run directory on ranks that may be
/// on another machine. Those that are empty are removed at the end of this object, so it must
/// outlive the engine.
class RunFolders {
 public:
  /// Makes the folders, and logs one line for each swap folder that a config key names. Collective:
  /// throws on all ranks Error(io) that names the key if one rank cannot make its folder. `ranks`:
  /// null for one rank.
  RunFolders(const config::Config& config, const engine::Blueprint& blueprint, comm::Ranks* ranks);

  /// Lets the swap folders stay that a config key names.
  void keep();

 private:
  void make_swap_folders(const state::SwapOptions& options);

  std::list<formats::MadeDirectory> unnamed_;
  std::list<formats::MadeDirectory> named_;
};

}  // namespace ballast::train
