#pragma once

#include <cstdint>

#include "ballast/core/dtype.h"
#include "ballast/model/step_program.h"

namespace ballast::model {

/// The type of the numbers that passes write to a port.
enum class PortNumbers : std::uint8_t {
  none,         ///< nothing, or not only numbers of one type
  of_training,  ///< the training type
  f32,
  f64
};

constexpr PortNumbers numbers_of(Port port) {
  switch (port) {
    case Port::output:
    case Port::activation_gradient:
    case Port::keys_values:
    case Port::layer_inputs:
      return PortNumbers::of_training;
    case Port::gradient:
    case Port::output_gradient:
    case Port::table_rows_gradient:
    case Port::partial_sums:
    case Port::keys_values_gradient:
      return PortNumbers::f32;
    case Port::losses:
      return PortNumbers::f64;
    default:
      return PortNumbers::none;
  }
}

/// Calls `work(T())` with the type of the port's numbers, if they have one. `type`: the training
/// type. Returns whether it did.
template <class Work>
bool with_numbers(Port port, DType type, const Work& work) {
  switch (numbers_of(port)) {
    case PortNumbers::none:
      return false;
    case PortNumbers::of_training:
      with_training_type(type, work);
      return true;
    case PortNumbers::f32:
      work(float());
      return true;
    case PortNumbers::f64:
      work(double());
      return true;
  }
  return false;
}

/// Exact.
constexpr double to_double(double value) {
  return value;
}
template <class T>
constexpr double to_double(T value) {
  return to_float(value);
}

}  // namespace ballast::model
