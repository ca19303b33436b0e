#pragma once

#include <algorithm>
#include <cstddef>

#include "ballast/core/dtype.h"

#include "src/model/compute/layer.h"

namespace ballast::model::host {

// Ops::copy_groups() and sum_groups() for rows [begin, end).

template <class T>
void copy_groups_of_rows(const Groups& groups, const T* from, const GroupSteps& from_steps, T* to,
                         const GroupSteps& to_steps, std::size_t zeros, std::size_t begin,
                         std::size_t end) {
  for (std::size_t row = begin; row < end; ++row) {
    for (std::size_t group = 0; group < groups.count; ++group) {
      T* const at = to + row * to_steps.row + group * to_steps.group;
      std::copy_n(from + row * from_steps.row + group * from_steps.group, groups.width, at);
      std::fill_n(at + groups.width, zeros, T{});
    }
  }
}

template <class T>
void sum_groups_of_rows(const Groups& groups, const T* from, const GroupSteps& steps, T* to,
                        std::size_t to_row, std::size_t begin, std::size_t end) {
  for (std::size_t row = begin; row < end; ++row) {
    for (std::size_t column = 0; column < groups.width; ++column) {
      float sum = 0.0F;
      for (std::size_t group = 0; group < groups.count; ++group) {
        sum += to_float(from[row * steps.row + group * steps.group + column]);
      }
      to[row * to_row + column] = from_float<T>(sum);
    }
  }
}

}  // namespace ballast::model::host
