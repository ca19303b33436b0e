#pragma once

#include "ballast/comm/communicator.h"
#include "ballast/config/config.h"
#include "ballast/train/run_options.h"

namespace ballast::train {

/// Returns the config of a run with these options. If the run resumes from a checkpoint without
/// model.pad_token_id, as versions wrote that lack the key, it continues to train the row of that
/// token, unless options.allowed_changes names the key. Logs this on rank 0. Collective.
config::Config with_pad_token_of_checkpoint(const config::Config& config, const RunOptions& options,
                                            comm::Ranks* ranks);

}  // namespace ballast::train
