#pragma once

#include <cstdint>
#include <span>

#include "ballast/core/dtype.h"
#include "ballast/core/units.h"
#include "ballast/cpu_adam/rules.h"

namespace ballast::cpu_adam {

/// Offset between the starts of a shard's arrays (array k is moved by k times this), so that their
/// distances are not powers of two. With such distances an update can run at a third of its speed
/// on AMD Zen, whose L1 cache selects the way by bits 12 to 27 of the address, hashed as 12 with
/// 27, 13 with 26, 14 with 25 and so on (Lipp et al., "Take A Way", AsiaCCS 2020). Seven pages are
/// the least that separates distances of 1, 3, 5 and 7 times a power of two there; 13 lines spread
/// five arrays evenly over the sets.
inline constexpr Bytes kArraySkew = 7 * kPage + 13 * kCacheLine;

/// The weights of a shard: format and arrays, which the caller owns.
struct Weights {
  enum class Format : std::uint8_t {
    split,      ///< bf16 weight + the 16-bit remainder of its fp32 master (core/dtype.h)
    plain,      ///< fp32
    copy_bf16,  ///< fp32 master and a write-only bf16 copy (to nearest, ties to even)
    copy_f16,   ///< fp32 master and a write-only IEEE binary16 copy (to nearest, ties to even)
  };
  static constexpr int kFormats = 4;

  Weights(Bf16* weight, std::uint16_t* remainder)
      : format(Format::split), main(weight), remainder_or_copy(remainder) {}
  explicit Weights(float* weight) : format(Format::plain), main(weight) {}
  Weights(float* master, Bf16* copy)
      : format(Format::copy_bf16), main(master), remainder_or_copy(copy) {}
  Weights(float* master, F16* copy)
      : format(Format::copy_f16), main(master), remainder_or_copy(copy) {}
  Weights(Format form, void* first, void* second)
      : format(form), main(first), remainder_or_copy(second) {}

  /// The format of weights of training type `type` and an array for the rest of their fp32 masters:
  /// for bf16 a 16-bit remainder, for fp16, whose numbers have another exponent, the whole master.
  /// fp32 weights are their own masters.
  static constexpr Format format_of(DType type) {
    return type == DType::f32    ? Format::plain
           : type == DType::bf16 ? Format::split
                                 : Format::copy_f16;
  }
  /// Bytes of one element of the second of these arrays.
  static constexpr Bytes master_width(DType type) {
    return type == DType::f32 ? 0 : type == DType::bf16 ? sizeof(std::uint16_t) : sizeof(float);
  }
  /// Both arrays; the second is ignored for fp32.
  static Weights of(DType type, void* weights, void* masters) {
    const Format form = format_of(type);
    if (form == Format::copy_f16) return {form, masters, weights};
    return {form, weights, form == Format::plain ? nullptr : masters};
  }

  Format format;
  void* main;
  void* remainder_or_copy = nullptr;  ///< remainder or copy; null for plain
};

/// The gradient of a shard, read only.
struct Gradient {
  explicit Gradient(const Bf16* values) : type(DType::bf16), data(values) {}
  explicit Gradient(const F16* values) : type(DType::f16), data(values) {}
  explicit Gradient(const float* values) : type(DType::f32), data(values) {}
  Gradient(DType element, const void* values) : type(element), data(values) {}

  DType type;
  const void* data;
};

/// A moment in 8 bits: one shared power of two for every 256 elements (the last block may be
/// shorter) and a code per element, a small float relative to it, so that values far below the
/// largest of their block survive. README.md describes the codes. All zeros means zero.
struct Codes {
  static constexpr Elems kBlock = 256;
  /// Number of shared exponents of `elements` elements, one byte each.
  static constexpr Elems exponents_of(Elems elements) { return (elements + kBlock - 1) / kBlock; }

  std::uint8_t* codes = nullptr;      ///< one byte per element
  std::uint8_t* exponents = nullptr;  ///< exponents_of(size) bytes
};

/// The moments of a shard. Those that the optimizer does not keep are ignored.
struct Moments {
  enum class Format : std::uint8_t {
    f32,         ///< both fp32
    bf16_first,  ///< first moment bf16, rounded stochastically; second fp32; changes results
    blockwise8,  ///< both Codes, rounded stochastically; changes results
  };

  Moments(float* first_moment, float* second_moment)
      : format(Format::f32), first(first_moment), second(second_moment) {}
  Moments(Bf16* first_moment, float* second_moment)
      : format(Format::bf16_first), first(first_moment), second(second_moment) {}
  Moments(Codes first_moment, Codes second_moment)
      : format(Format::blockwise8),
        first(first_moment.codes),
        second(second_moment.codes),
        first_exponents(first_moment.exponents),
        second_exponents(second_moment.exponents) {}
  /// Arrays of a format that is known at run time; exponents only with Codes.
  Moments(Format form, void* first_moment, void* second_moment,
          std::uint8_t* exponents_of_first = nullptr, std::uint8_t* exponents_of_second = nullptr)
      : format(form),
        first(first_moment),
        second(second_moment),
        first_exponents(exponents_of_first),
        second_exponents(exponents_of_second) {}

  Format format;
  void* first;
  void* second;
  std::uint8_t* first_exponents = nullptr;
  std::uint8_t* second_exponents = nullptr;
};

/// The arrays of one update, in host memory, each `size` elements long and aligned to its element.
/// All but `gradient` are updated in place. The arrays do not overlap.
struct Shard {
  Weights weights;
  Moments moments;
  Gradient gradient;
  Elems size = 0;
  /// Number of the first element among all parameters of the model; stochastic rounding is keyed by
  /// (step, element). With Codes, a multiple of Codes::kBlock.
  Elems first_element = 0;
  /// The elements without weight decay, numbered as first_element, in ascending ranges that do not
  /// overlap and begin and end at multiples of kDecayStep. They must stay valid until the update is
  /// done.
  std::span<const ElementRange> undecayed = {};

  static constexpr Elems kDecayStep = 32;
};

/// Elements [first, first + count) of `shard`, within its size; the arrays stay the caller's. With
/// Codes, `first` is a multiple of Codes::kBlock.
Shard part_of(const Shard& shard, Elems first, Elems count);

/// Check values of bf16 weights, which show whether weights were changed. Each block of kBlock
/// consecutive weights has kColumns check values of 16 bits. Each value is a hash of every
/// kColumns-th weight, so that vectors of any width compute it. It differs if one of these weights
/// differs, and with a probability of 1 - 2^-16 if several differ. Weights missing in the last
/// block count as zero.
struct WeightChecks {
  static constexpr Elems kColumns = 16;
  static constexpr Elems kRows = 8;
  static constexpr Elems kBlock = kColumns * kRows;

  /// Number of check values of `elements` weights.
  static constexpr Elems values_of(Elems elements) {
    return (elements + kBlock - 1) / kBlock * kColumns;
  }
};

/// Writes values_of(count) check values, on the calling thread. The same for every instruction set.
void compute_checks(const Bf16* weights, Elems count, std::uint16_t* values);

}  // namespace ballast::cpu_adam
