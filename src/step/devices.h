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

/// The copies of values between devices in a list of stops. A value that a pass has written is
/// copied at once to each other device on which a pass reads it before it is written again.
///
/// Recipes are not followed: their passes and the values that they read and write are on the device
/// of one layer.
class Routes {
 public:
  /// No copies, for one device.
  Routes() = default;
  /// `device_of`: by block.
  Routes(const model::StepProgram& program, const std::vector<const model::Stop*>& stops,
         const std::vector<std::uint8_t>& device_of);

  struct Copy {
    model::ValueId value = 0;
    std::uint8_t to = 0;
  };
  /// Returns the copies after a pass.
  [[nodiscard]] const std::vector<Copy>& after(model::PassId pass) const {
    static const std::vector<Copy> kNothing;
    return copies_.empty() ? kNothing : copies_[pass];
  }
  /// Returns whether no pass on the device of `pass` reads `value` as it is after `pass`, but
  /// passes on other devices do.
  [[nodiscard]] bool leaves(model::PassId pass, model::ValueId value) const;
  /// Returns whether a pass on `device` reads or writes `value`.
  [[nodiscard]] bool uses(model::ValueId value, std::uint8_t device) const {
    return devices_.empty() ? device == 0 : (devices_[value] >> device & 1U) != 0;
  }
  /// Returns whether `value` has a life on `device` on which nothing there reads it.
  [[nodiscard]] bool leaves_from(model::ValueId value, std::uint8_t device) const {
    return !left_.empty() && (left_[value] >> device & 1U) != 0;
  }
  /// Returns whether passes on `device` read `value`.
  [[nodiscard]] bool stays_on(model::ValueId value, std::uint8_t device) const {
    return stays_.empty() ? device == 0 : (stays_[value] >> device & 1U) != 0;
  }

 private:
  using Devices = std::uint16_t;                      ///< one bit each
  std::vector<std::vector<Copy>> copies_;             ///< by pass
  std::vector<std::vector<model::ValueId>> leaving_;  ///< by pass
  // By value.
  std::vector<Devices> devices_;
  std::vector<Devices> left_;
  std::vector<Devices> stays_;
};

}  // namespace ballast::step
