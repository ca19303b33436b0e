#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <string>
#include <string_view>

#include "ballast/config/config.h"
#include "ballast/model/architecture.h"
#include "ballast/plan/rates.h"

namespace ballast::calibrate {

/// Parts of a machine that are measured and kept one by one.
enum class CalibrationPart : std::uint8_t { compute, update, link, swap };
inline constexpr std::array kParts = {CalibrationPart::compute, CalibrationPart::update,
                                      CalibrationPart::link, CalibrationPart::swap};

/// "compute", "update", "link", "swap".
std::string_view to_string(CalibrationPart part) noexcept;

/// Share of the CPU time for other work from which a measurement is disturbed.
inline constexpr double kMuchOtherWork = 0.1;

/// The state in which a calibration begins.
struct CalibrationStart {
  /// Other processes use the CPUs: all is measured once and corrected for that.
  bool busy = false;
  /// Parts that have rates here are not measured.
  plan::Rates known = {};
};

/// Measured rates of this machine.
struct Calibration {
  plan::Rates rates;
  /// The reason why the measurement was disturbed; "" if nothing did. The rates are then corrected
  /// for other work, which is less exact.
  std::string disturbance;
  /// Share of the CPU time that other work used while each part was measured; 1 for rates that
  /// contradict each other. 0 for a part that was known.
  std::array<double, kParts.size()> other_work = {};
};

/// Whether `rates` has the rates of `part`.
bool has_part(const plan::Rates& rates, CalibrationPart part);

/// Copies the rates of `part`.
void copy_part(CalibrationPart part, const plan::Rates& from, plan::Rates& to);

/// Measures this machine for the model and swap paths of `config`: kernels of one layer and of the
/// head at a few micro-batch sizes (including the config's own), the optimizer update, host-device
/// copies, and reads, writes and mixed I/O through the swap space, striped by the bandwidths in
/// aio.paths. Takes a few seconds and memory for one layer, its workspace and half a GiB more;
/// leaves no files. Sequences that take too long are measured shorter. A measurement that other
/// work disturbs, or whose rates contradict each other, is repeated once with corrections for a
/// busy machine (src/calibrate/slices.h). The speed of compute during copies and transfers is only
/// measured on a quiet machine and otherwise 0. `interrupted` (may be null) ends it with
/// Error(interrupted). Throws Error like a run. Swap paths that cannot be used cause a warning and
/// rates of 0 if the config names no tier on NVMe, otherwise an Error.
Calibration calibrate(const config::Config& config, const model::Architecture& model,
                      const std::atomic<bool>* interrupted = nullptr,
                      const CalibrationStart& start = {});

/// What the rates of `part` depend on, as text: version of the program and of its libraries,
/// processor, cores, threads, type and shape of the model's layers, and for compute and link the
/// device, for swap the paths.
std::string part_key(CalibrationPart part, const config::Config& config,
                     const model::Architecture& model);

/// Everything that a calibration depends on, as text: the keys of all parts. Rates are reusable
/// where the keys are equal.
std::string calibration_key(const config::Config& config, const model::Architecture& model);

}  // namespace ballast::calibrate
