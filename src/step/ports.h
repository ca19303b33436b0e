#pragma once

#include "ballast/model/step_program.h"
#include "ballast/schedule/plan.h"

namespace ballast::step {

/// The role of the buffer that a compute operation binds to `port`.
constexpr schedule::Role role_of(model::Port port) {
  return static_cast<schedule::Role>(static_cast<unsigned>(schedule::Role::first_port) +
                                     static_cast<unsigned>(port));
}

constexpr schedule::Speed speed_of(model::CostCurve curve) {
  switch (curve) {
    case model::CostCurve::backward:
      return schedule::Speed::backward;
    case model::CostCurve::head:
      return schedule::Speed::head;
    case model::CostCurve::forward:
      break;
  }
  return schedule::Speed::forward;
}

}  // namespace ballast::step
