#pragma once

#include <cstdint>
#include <vector>

#include "ballast/model/step_program.h"

namespace ballast::step {

/// Returns, by block, the device that computes it, keeps the homes of its data on a device, and
/// moves them. A pure function of the model.
///
/// Layer l is on device l mod `devices`, with all of its blocks, so that a pass through the model
/// visits the devices in turn. Tiles of the vocabulary also go round: those of the embedding from
/// device 0 on, and those of the head from the device after the last layer's. A tied head has the
/// tiles of the embedding, and its norm is on device 0.
std::vector<std::uint8_t> deal(const model::StepProgram& program, std::uint32_t devices);

}  // namespace ballast::step
