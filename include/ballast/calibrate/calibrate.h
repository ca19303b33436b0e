#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <string>
#include <string_view>

#include "ballast/engine/run_inputs.h"
#include "ballast/model/architecture.h"
#include "ballast/plan/rates.h"

namespace ballast::calibrate {

/// Parts of a machine that are measured and cached separately.
enum class CalibrationPart : std::uint8_t { compute, update, link, swap };
inline constexpr std::array kParts = {CalibrationPart::compute, CalibrationPart::update,
                                      CalibrationPart::link, CalibrationPart::swap};

/// Returns "compute", "update", "link" or "swap".
std::string_view to_string(CalibrationPart part) noexcept;

/// A measurement is disturbed if other work uses at least this share of the CPU time.
inline constexpr double kMuchOtherWork = 0.1;

/// Conditions at the start of a calibration.
struct CalibrationStart {
  /// True if other processes use the CPUs: everything is measured once, with corrections.
  bool busy = false;
  /// Known rates; their parts are not measured.
  plan::Rates known = {};
};

/// Measured rates of this machine.
struct Calibration {
  plan::Rates rates;
  /// Reason why the measurement was disturbed; "" if it was not. The rates are then corrected for
  /// other work, which is less accurate.
  std::string disturbance;
  /// Share of the CPU time that other work used while each part was measured; 1 for rates that
  /// contradict each other, 0 for a known part.
  std::array<double, kParts.size()> other_work = {};
  /// Differences between the repetitions of each part's measurements, see plan::Rates; 0 for a
  /// known part.
  std::array<double, kParts.size()> spread = {};
};

/// Returns whether `rates` has the rates of `part`.
bool has_part(const plan::Rates& rates, CalibrationPart part);

/// Copies the rates of `part`.
void copy_part(CalibrationPart part, const plan::Rates& from, plan::Rates& to);

/// Measures this machine for the model and swap paths of `run`: kernels of layers and of the
/// head at a few micro-batch sizes (including the run's own), the optimizer update, host-device
/// copies, and reads, writes and mixed I/O through the swap space, striped by the bandwidths in
/// aio.paths. Takes a few seconds and memory for one layer, its workspace and half a GiB more;
/// leaves no files. Long sequences are shortened for the measurement. A measurement that other work
/// disturbs, or whose rates contradict each other, is repeated once with corrections for a busy
/// machine (src/calibrate/calibration.h). The speed of compute during copies and transfers is only
/// measured on a quiet machine and otherwise 0. `interrupted` (may be null) stops it with
/// Error(interrupted). Throws Error like a run. Unusable swap paths are an Error if the run
/// places anything on NVMe; otherwise they cause a warning and rates of 0.
Calibration calibrate(const engine::RunInputs& run, const std::atomic<bool>* interrupted = nullptr,
                      const CalibrationStart& start = {});

/// Returns everything that the rates of `part` depend on, as text: version of the program and its
/// libraries, processor, cores, threads, type and shape of the model's layers; for compute and link
/// also the device, for swap the paths.
std::string part_key(CalibrationPart part, const engine::RunInputs& run);

/// Returns everything that a calibration depends on, as text: the keys of all parts. Rates are
/// reusable if the keys are equal.
std::string calibration_key(const engine::RunInputs& run);

}  // namespace ballast::calibrate
