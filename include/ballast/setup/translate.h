#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "ballast/comm/communicator.h"
#include "ballast/config/config.h"
#include "ballast/core/places.h"
#include "ballast/device/device.h"
#include "ballast/engine/run_inputs.h"
#include "ballast/memory/machine.h"
#include "ballast/model/architecture.h"
#include "ballast/model/compute.h"

namespace ballast::setup {

/// Translates `config` for the rank of `launch`. Throws Error(config) for a model that cannot be
/// trained as configured.
engine::RunInputs translate(const config::Config& config, const comm::Launch& launch = {});

/// The kernels, and the threads of updates, of a run. For callers that need no model, which
/// translate() builds.
engine::KernelRequest kernel_request(const config::Config& config);
cpu_adam::UpdaterOptions updater_options(const config::Config& config);

/// Returns planner::leaves_choices() of the run of `config`.
bool leaves_choices(const config::Config& config);

/// Returns `requested` with each 0 replaced by a share of the `available` bytes of this machine's
/// memory, or of the memory of the device in `config` if that is separate
/// (memory::resolve_budgets). The run has `ranks` processes.
memory::Budgets resolve_budgets(const config::Config& config, memory::Budgets requested,
                                Bytes available, std::uint32_t ranks = 1,
                                std::uint32_t local_rank = 0);

/// Returns the number of channels between ranks for which NCCL takes memory on each GPU of a run of
/// `config` with `ranks` processes. If the planner decides about expert parallelism, counts its
/// channel. Throws Error(config) if the ranks cannot share one copy of the weights as configured.
std::uint32_t channels_per_device(const config::Config& config, std::uint32_t ranks);

/// Returns the model that `config` trains, with its frozen tensors. Throws Error(config).
model::Architecture model_of(const config::Config& config);

/// Throws Error(device) if `config` requests a GPU that this rank cannot use, or leaves the choice
/// open and this rank's GPU cannot be used for a reason with a remedy (device::require_device).
/// Logs a warning if ballast.device_bytes leaves too little memory for libraries. Call it before
/// budgets are computed, because they are guessed without the GPU.
void check_device(const config::Config& config, const comm::Launch& launch = {});

/// Checks this rank's swap paths if `config` places anything on NVMe and the paths are known: only
/// rank 0 knows a run directory without a name. Throws like state::check_paths().
void check_swap_paths(const config::Config& config, const comm::Launch& launch = {});

/// Returns the bytes written to each swap directory of a machine with `ranks` similar ranks. `own`:
/// the bytes that one rank writes to each of its directories, or their sum if the division is
/// unknown. Ranks with an equal number of directories divide theirs in the same way, others evenly.
std::vector<Bytes> written_by_machine(const config::Config& config, std::uint32_t ranks,
                                      std::span<const Bytes> own);

/// Returns the mesh of a run of `config` with `ranks` processes, of which this is `rank`.
Mesh mesh_of(const config::Config& config, std::uint32_t ranks, std::uint32_t rank = 0);

/// Returns the shape of a micro-batch of `sequences` sequences on one rank.
model::MicroBatchShape shape_of(const config::Config& config, std::uint64_t sequences);

/// Returns the distinct paths of both offload sections in order, or the run directory, each with
/// the settings of its entry in aio.paths or, without one, those of aio. Paths are assigned
/// round-robin to the ranks of a machine; if there are fewer paths than ranks, ranks share a path.
state::SwapOptions swap_options(const config::Config& config, const comm::Launch& launch = {});

/// Returns the GPU numbers of the devices of rank `local_rank` of its machine: ballast.devices, or
/// consecutive ones. Host devices have numbers, too.
std::vector<std::uint32_t> device_numbers(const config::Config& config, std::uint32_t local_rank);

/// Returns options for the first device in `config`, for rank `local_rank` of its machine. All
/// devices of a rank are of one kind.
device::DeviceOptions device_options(const config::Config& config, std::uint32_t local_rank = 0);

/// Returns the number of devices between which automatic budgets of the host device are divided.
std::uint32_t budgeted_devices(const config::Config& config);

/// Returns the free memory of each device in `config`, the least of all, for rank `local_rank` of
/// its machine. Devices with the same number share its memory. 0 if the devices use host memory.
Bytes own_device_memory(const config::Config& config, std::uint32_t local_rank);

}  // namespace ballast::setup
