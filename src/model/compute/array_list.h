#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/core/units.h"

namespace ballast::model {

/// A moment of a layer's work, see LayerMoments.
using Moment = int;
/// The moments at which an array is written first and read last.
struct ArrayLife {
  Moment from = 0;
  Moment to = 0;
};

/// Moments of sublayer `number` of `count`. The backward pass follows the forward pass.
struct LayerMoments {
  enum Forward { before, maps, shape, core, out };
  enum Backward { d_after, d_out, d_core, d_shape, d_maps, d_before };
  static constexpr int kSteps = 6;

  int count = 1;
  int number = 0;

  [[nodiscard]] Moment at(Forward step) const { return kSteps * number + step; }
  [[nodiscard]] Moment at(Backward step) const {
    return kSteps * count + kSteps * (count - 1 - number) + step;
  }
};

/// The arrays of a layer between its forward and its backward pass. Memory is a row of places in
/// the order in which they are declared. A place has several arrays, one after the other: their
/// lives must not overlap, but a value and its gradient may meet.
class ArrayList {
 public:
  using Place = std::size_t;
  using Id = std::size_t;

  /// Declares a place. `known`: Port::kept_attention keeps it, too.
  Place place(std::string_view name, bool known = false) {
    places_.push_back({.name = name, .known = known});
    return places_.size() - 1;
  }
  /// Declares an array in a place, which has the size of its largest array.
  Id add(Place place, std::string_view name, Bytes bytes, std::vector<ArrayLife> lives) {
    places_[place].bytes = std::max(places_[place].bytes, round_up(bytes, kCacheLine));
    arrays_.push_back({name, place, std::move(lives)});
    return arrays_.size() - 1;
  }
  /// Declares a place for one array.
  Id own(std::string_view name, Bytes bytes, ArrayLife life, bool known = false) {
    return add(place(name, known), name, bytes, {life});
  }
  /// Lays out the places. Throws Error(state) if two arrays of a place are alive together.
  void finish() {
    for (PlaceLayout& one : places_) {
      one.offset = bytes_;
      bytes_ += one.bytes;
      if (!one.known) continue;
      one.known_offset = known_bytes_;
      known_bytes_ += one.bytes;
    }
    const std::string both = clash();
    expects(both.empty(), "arrays of a layer are alive together: " + both);
  }

  [[nodiscard]] Place place_of(Id array) const { return arrays_[array].place; }
  [[nodiscard]] bool is_known(Id array) const { return places_[place_of(array)].known; }
  /// Offset of an array among all places, or among the known ones.
  [[nodiscard]] Bytes offset(Id array, bool among_known) const {
    const PlaceLayout& place = places_[place_of(array)];
    return among_known ? place.known_offset : place.offset;
  }
  [[nodiscard]] Bytes bytes() const { return bytes_; }
  [[nodiscard]] Bytes known_bytes() const { return known_bytes_; }

 private:
  struct PlaceLayout {
    std::string_view name;
    bool known = false;
    Bytes bytes = 0;
    Bytes offset = 0;
    Bytes known_offset = 0;
  };
  struct Array {
    std::string_view name;
    Place place = 0;
    std::vector<ArrayLife> lives;
  };

  /// Names two arrays in one place that are alive together; "": there are none.
  [[nodiscard]] std::string clash() const {
    const auto meet = [](const Array& a, const Array& b) {
      for (const ArrayLife& one : a.lives) {
        for (const ArrayLife& other : b.lives) {
          if (one.from < other.to && other.from < one.to) return true;
        }
      }
      return false;
    };
    for (std::size_t i = 0; i < arrays_.size(); ++i) {
      for (std::size_t j = i + 1; j < arrays_.size(); ++j) {
        if (arrays_[i].place == arrays_[j].place && meet(arrays_[i], arrays_[j])) {
          return fmt::format("{} and {} in '{}'", arrays_[i].name, arrays_[j].name,
                             places_[arrays_[i].place].name);
        }
      }
    }
    return "";
  }

  std::vector<PlaceLayout> places_;
  std::vector<Array> arrays_;
  Bytes bytes_ = 0;
  Bytes known_bytes_ = 0;
};

}  // namespace ballast::model
