#include <array>
#include <bit>
#include <cstdint>
#include <utility>

#include "cpu_adam/kernel.h"
#include "src/device/cuda/kernel_language.h"
#include "src/update/cuda/kernels.h"
#include "src/update/cuda/thread_lanes.h"

// Each warp updates a tile of 256 elements, the block of 8-bit moments, in one pass: everything is
// loaded, then decoded, updated by the rules of cpu_adam, encoded and stored. A lane has two runs
// of four elements, one in each half of the tile, so that a warp's accesses are contiguous for
// every element width: 16 bytes per lane of an fp32 array, 8 of a 16-bit one. Optimizer and format
// of the moments are template arguments; the formats of weights and gradient are tested once per
// tile.
namespace ballast::update::cuda {
namespace {

using cpu_adam::Coefficients;
using cpu_adam::Moments;
using cpu_adam::Streams;
using cpu_adam::Weights;

constexpr unsigned kTile = cpu_adam::kTile;
constexpr unsigned kRun = 4;
constexpr unsigned kOwn = kTile / device::kWarp;
constexpr unsigned kWarps = 8;

/// A tile from the view of one lane.
struct Place {
  std::size_t start;  ///< the tile's first element
  unsigned count;     ///< number of elements in the tile
  bool in_runs;       ///< the tile is full and aligned to runs

  /// Returns the index in the tile of this lane's element `own`.
  static __device__ unsigned element(unsigned own) {
    const unsigned lane = threadIdx.x % device::kWarp;
    return own / kRun * (kTile / 2) + lane * kRun + own % kRun;
  }
  __device__ bool has(unsigned own) const { return element(own) < count; }
};

/// This lane's elements of an array, packed in words like in memory, so that the code waits for a
/// load only where it uses the elements. `Bits`: bit pattern of an element.
template <class Bits>
struct PackedBits {
  static constexpr unsigned kInWord = sizeof(std::uint32_t) / sizeof(Bits);
  static constexpr unsigned kWordsOfRun = kRun / kInWord;
  struct alignas(kRun * sizeof(Bits)) Run {
    std::uint32_t words[kWordsOfRun];
  };

  std::uint32_t words[kOwn / kInWord];

  __device__ Bits get(unsigned own) const {
    return static_cast<Bits>(words[own / kInWord] >> (own % kInWord * 8 * sizeof(Bits)));
  }
  /// Call it in ascending order of `own`, because the first element of a word clears the word.
  __device__ void set(unsigned own, Bits bits) {
    std::uint32_t& word = words[own / kInWord];
    const std::uint32_t before = own % kInWord == 0 ? 0U : word;
    word = before | (std::uint32_t{bits} << (own % kInWord * 8 * sizeof(Bits)));
  }

  /// Elements after the end are zero.
  __device__ void load(const void* array, Place at) {
    const Bits* const tile = static_cast<const Bits*>(array) + at.start;
    if (at.in_runs) {
      for (unsigned r = 0; r < kOwn / kRun; ++r) {
        const Run run = *reinterpret_cast<const Run*>(tile + Place::element(r * kRun));
        for (unsigned w = 0; w < kWordsOfRun; ++w) words[r * kWordsOfRun + w] = run.words[w];
      }
    } else {
      for (unsigned i = 0; i < kOwn; ++i) set(i, at.has(i) ? tile[Place::element(i)] : Bits{0});
    }
  }
  __device__ void store(void* array, Place at) const {
    Bits* const tile = static_cast<Bits*>(array) + at.start;
    if (at.in_runs) {
      for (unsigned r = 0; r < kOwn / kRun; ++r) {
        Run run;
        for (unsigned w = 0; w < kWordsOfRun; ++w) run.words[w] = words[r * kWordsOfRun + w];
        *reinterpret_cast<Run*>(tile + Place::element(r * kRun)) = run;
      }
    } else {
      for (unsigned i = 0; i < kOwn; ++i) {
        if (at.has(i)) tile[Place::element(i)] = get(i);
      }
    }
  }
};
using Floats = PackedBits<std::uint32_t>;
using Halves = PackedBits<std::uint16_t>;

__device__ void unpack(const Floats& packed, float (&numbers)[kOwn]) {
  for (unsigned i = 0; i < kOwn; ++i) numbers[i] = std::bit_cast<float>(packed.get(i));
}
/// `Format`: one of the 16-bit gradient formats.
template <class Format>
__device__ void unpack_as(const Halves& packed, float (&numbers)[kOwn]) {
  for (unsigned i = 0; i < kOwn; ++i) {
    const std::uint16_t bits = packed.get(i);
    numbers[i] = Format::template load<ThreadLanes>(&bits).value;
  }
}

/// The masters in any storage format.
struct Masters {
  Floats whole;
  Halves upper;  ///< split weights: the weight
  Halves lower;  ///< the remainder, or a copy

  __device__ void load(const Streams& s, Weights::Format format, Place at) {
    if (format == Weights::Format::split) {
      upper.load(s.main, at);
      lower.load(s.remainder_or_copy, at);
    } else {
      whole.load(s.main, at);
    }
  }
  __device__ void decode(Weights::Format format, float (&numbers)[kOwn]) const {
    if (format != Weights::Format::split) return unpack(whole, numbers);
    for (unsigned i = 0; i < kOwn; ++i) {
      const std::uint16_t weight = upper.get(i);
      const std::uint16_t remainder = lower.get(i);
      numbers[i] = cpu_adam::SplitWeights::load<ThreadLanes>(&weight, &remainder).value;
    }
  }
  __device__ void encode(Weights::Format format, const float (&numbers)[kOwn]) {
    if (format == Weights::Format::split) return encode_as<cpu_adam::SplitWeights>(upper, numbers);
    if (format == Weights::Format::plain) return encode_as<cpu_adam::PlainWeights>(whole, numbers);
    if (format == Weights::Format::copy_bf16) {
      encode_as<cpu_adam::Bf16Copy>(whole, numbers);
    } else {
      encode_as<cpu_adam::F16Copy>(whole, numbers);
    }
  }
  __device__ void store(const Streams& s, Weights::Format format, Place at) const {
    if (format == Weights::Format::split) {
      upper.store(s.main, at);
    } else {
      whole.store(s.main, at);
    }
    if (format != Weights::Format::plain) lower.store(s.remainder_or_copy, at);
  }

 private:
  template <class Weight, class Bits>
  __device__ void encode_as(PackedBits<Bits>& packed, const float (&numbers)[kOwn]) {
    for (unsigned i = 0; i < kOwn; ++i) {
      typename Weight::Main main;
      typename Weight::RemainderOrCopy remainder_or_copy;
      Weight::template store<ThreadLanes>(&main, &remainder_or_copy, Rounded{numbers[i]});
      packed.set(i, std::bit_cast<Bits>(main));
      if constexpr (Weight::kStoresRemainderOrCopy) lower.set(i, remainder_or_copy);
    }
  }
};

struct Gradients {
  Floats whole;
  Halves half;

  __device__ void load(const Streams& s, DType type, Place at) {
    if (type == DType::f32) {
      whole.load(s.gradient, at);
    } else {
      half.load(s.gradient, at);
    }
  }
  __device__ void decode(DType type, float (&numbers)[kOwn]) const {
    if (type == DType::bf16) {
      unpack_as<cpu_adam::Bf16Gradient>(half, numbers);
    } else if (type == DType::f16) {
      unpack_as<cpu_adam::F16Gradient>(half, numbers);
    } else {
      unpack(whole, numbers);
    }
  }
};

/// Random bits for each element.
using Draws = std::uint32_t[kOwn];

// Moments, one type per format. Only codes have exponents. All lanes of a warp encode together.

struct FloatMoment {
  Floats packed;

  __device__ void load(const void* array, const std::uint8_t*, Place at) { packed.load(array, at); }
  __device__ void decode(float (&numbers)[kOwn]) const { unpack(packed, numbers); }
  __device__ void encode(const float (&numbers)[kOwn], const Draws&) {
    for (unsigned i = 0; i < kOwn; ++i) packed.set(i, std::bit_cast<std::uint32_t>(numbers[i]));
  }
  __device__ void store(void* array, std::uint8_t*, Place at) const { packed.store(array, at); }
};

struct Bf16Moment {
  Halves packed;

  __device__ void load(const void* array, const std::uint8_t*, Place at) { packed.load(array, at); }
  __device__ void decode(float (&numbers)[kOwn]) const {
    unpack_as<cpu_adam::Bf16Gradient>(packed, numbers);
  }
  __device__ void encode(const float (&numbers)[kOwn], const Draws& draws) {
    for (unsigned i = 0; i < kOwn; ++i) {
      const std::uint32_t bits =
          cpu_adam::round_to_bf16<ThreadLanes>(Rounded{numbers[i]}, draws[i]);
      packed.set(i, static_cast<std::uint16_t>(bits >> 16));
    }
  }
  __device__ void store(void* array, std::uint8_t*, Place at) const { packed.store(array, at); }
};

template <class Kind>
struct BlockwiseMoment {
  PackedBits<std::uint8_t> packed;
  std::uint32_t exponent;

  __device__ void load(const void* array, const std::uint8_t* exponents, Place at) {
    packed.load(array, at);
    exponent = exponents[at.start / kTile];
  }
  __device__ void decode(float (&numbers)[kOwn]) const {
    const std::uint32_t base = cpu_adam::code_base<Kind>(exponent);
    for (unsigned i = 0; i < kOwn; ++i) {
      numbers[i] = cpu_adam::expand_code<ThreadLanes, Kind>(packed.get(i), base).value;
    }
  }
  __device__ void encode(const float (&numbers)[kOwn], const Draws& draws) {
    exponent = shared_exponent(numbers);
    const cpu_adam::CodeScale<ThreadLanes, Kind> scale(exponent);
    for (unsigned i = 0; i < kOwn; ++i) {
      const std::uint32_t code =
          cpu_adam::compress_code<ThreadLanes, Kind>(scale, Rounded{numbers[i]}, draws[i]);
      packed.set(i, static_cast<std::uint8_t>(code));
    }
  }
  __device__ void store(void* array, std::uint8_t* exponents, Place at) const {
    packed.store(array, at);
    __syncwarp();  // all lanes have read the exponent, and shuffles do not order memory
    if (threadIdx.x % device::kWarp == 0) {
      exponents[at.start / kTile] = static_cast<std::uint8_t>(exponent);
    }
  }

 private:
  /// Returns the tile's exponent to all lanes. Elements after the end are zero.
  static __device__ std::uint32_t shared_exponent(const float (&numbers)[kOwn]) {
    std::uint32_t largest = 0;
    for (unsigned i = 0; i < kOwn; ++i) {
      const std::uint32_t magnitude = std::bit_cast<std::uint32_t>(numbers[i]) & 0x7fffffffU;
      largest = ThreadLanes::larger(largest, magnitude);
    }
    for (int other = device::kWarp / 2; other > 0; other /= 2) {
      largest = ThreadLanes::larger(largest, __shfl_xor_sync(device::kAllLanes, largest, other));
    }
    return cpu_adam::exponent_for(largest);
  }
};

template <Moments::Format format>
struct StoredMoments {
  using First = FloatMoment;
  using Second = FloatMoment;
};
template <>
struct StoredMoments<Moments::Format::bf16_first> {
  using First = Bf16Moment;
  using Second = FloatMoment;
};
template <>
struct StoredMoments<Moments::Format::blockwise8> {
  using First = BlockwiseMoment<cpu_adam::SignedCodes>;
  using Second = BlockwiseMoment<cpu_adam::UnsignedCodes>;
};

using Numbers = cpu_adam::Arrays<cpu_adam::PlainWeights, cpu_adam::F32Gradient>;

/// `undecayed`: Streams::undecayed.
template <class Rule>
__device__ void apply(const Coefficients& coefficients, std::uint8_t undecayed, Numbers numbers) {
  cpu_adam::Constants<ThreadLanes> k(coefficients);
  for (unsigned i = 0; i < kOwn; ++i) {
    const bool decays =
        ((undecayed >> (Place::element(i) / cpu_adam::Shard::kDecayStep)) & 1U) == 0;
    k.decay.value = decays ? coefficients.decay : 1.0F;
    k.l2.value = decays ? coefficients.l2 : 0.0F;
    cpu_adam::update_at<ThreadLanes, Rule>(k, numbers, i);
  }
}

template <class Rule>
__device__ void apply_either(const Coefficients& coefficients, std::uint8_t undecayed,
                             Numbers numbers) {
  if constexpr (requires { typename Rule::FromGradient; }) {
    if (coefficients.first_from_end) {
      return apply<typename Rule::FromGradient>(coefficients, undecayed, numbers);
    }
  }
  apply<Rule>(coefficients, undecayed, numbers);
}

/// `first`: index of the tile's first element.
template <Moments::Format format>
__device__ void draw(Draws& draws, const Coefficients& coefficients, std::uint32_t first) {
  for (unsigned i = 0; i < kOwn; ++i) {
    const unsigned element = Place::element(i);
    if constexpr (format == Moments::Format::blockwise8) {
      draws[i] = cpu_adam::draw_in_block<ThreadLanes>(coefficients.draw_key, first, element);
    } else {
      draws[i] = cpu_adam::draw<ThreadLanes>(coefficients.draw_key, first + element);
    }
  }
}

template <class Rule, Moments::Format format>
__global__ void __launch_bounds__(kWarps* device::kWarp, 3)
    update_tiles(Coefficients coefficients, Streams s, Weights::Format weights, DType type,
                 bool aligned) {
  const std::size_t tile = std::size_t{blockIdx.x} * kWarps + threadIdx.x / device::kWarp;
  const std::size_t start = tile * kTile;
  if (start >= s.size) return;
  const std::size_t left = s.size - start;
  const Place at = {.start = start,
                    .count = left < kTile ? static_cast<unsigned>(left) : kTile,
                    .in_runs = aligned && left >= kTile};
  Masters stored_masters;
  Gradients stored_gradients;
  typename StoredMoments<format>::First stored_first;
  typename StoredMoments<format>::Second stored_second;
  stored_masters.load(s, weights, at);
  if constexpr (Rule::kFirst) stored_first.load(s.first, s.first_exponents, at);
  if constexpr (Rule::kSecond) stored_second.load(s.second, s.second_exponents, at);
  stored_gradients.load(s, type, at);

  float masters[kOwn];
  float first[kOwn];
  float second[kOwn];
  float gradients[kOwn];
  stored_masters.decode(weights, masters);
  if constexpr (Rule::kFirst) stored_first.decode(first);
  if constexpr (Rule::kSecond) stored_second.decode(second);
  stored_gradients.decode(type, gradients);
  const std::uint8_t undecayed = format == Moments::Format::blockwise8 ? s.undecayed : 0;
  apply_either<Rule>(coefficients, undecayed, {masters, nullptr, first, second, gradients});

  stored_masters.encode(weights, masters);
  stored_masters.store(s, weights, at);
  Draws draws = {};
  if constexpr (format != Moments::Format::f32) {
    draw<format>(draws, coefficients, s.element + static_cast<std::uint32_t>(start));
  }
  if constexpr (Rule::kFirst) {
    stored_first.encode(first, draws);
    stored_first.store(s.first, s.first_exponents, at);
  }
  if constexpr (Rule::kSecond) {
    stored_second.encode(second, draws);
    stored_second.store(s.second, s.second_exponents, at);
  }
}

/// Returns whether all arrays have the alignment that loads of runs need.
bool all_aligned(const Streams& s) {
  std::uintptr_t addresses = 0;
  for (const void* array :
       {static_cast<const void*>(s.main), static_cast<const void*>(s.remainder_or_copy),
        static_cast<const void*>(s.first), static_cast<const void*>(s.second), s.gradient}) {
    addresses |= reinterpret_cast<std::uintptr_t>(array);
  }
  return addresses % alignof(Floats::Run) == 0;
}

template <class Rule, Moments::Format format>
cudaError_t launch_tiles(cudaStream_t stream, const Formats& formats,
                         const Coefficients& coefficients, const Streams& s) {
  const std::size_t per_block = std::size_t{kTile} * kWarps;
  const auto blocks = static_cast<unsigned>((s.size + per_block - 1) / per_block);
  return device::launch({.stream = stream, .blocks = blocks, .threads = kWarps * device::kWarp},
                        &update_tiles<Rule, format>, coefficients, s, formats.weights,
                        formats.gradient, all_aligned(s));
}

template <class Rule>
cudaError_t launch_rule(cudaStream_t stream, const Formats& formats,
                        const Coefficients& coefficients, const Streams& s) {
  switch (formats.moments) {
    case Moments::Format::f32:
      break;
    case Moments::Format::bf16_first:
      if constexpr (Rule::kFirst) {
        return launch_tiles<Rule, Moments::Format::bf16_first>(stream, formats, coefficients, s);
      }
      break;
    case Moments::Format::blockwise8:
      return launch_tiles<Rule, Moments::Format::blockwise8>(stream, formats, coefficients, s);
  }
  return launch_tiles<Rule, Moments::Format::f32>(stream, formats, coefficients, s);
}

template <class Rule>
cudaError_t load_rule() {
  const cudaError_t code = device::load(&update_tiles<Rule, Moments::Format::f32>);
  if (code != cudaSuccess) return code;
  if constexpr (Rule::kFirst) {
    const cudaError_t other = device::load(&update_tiles<Rule, Moments::Format::bf16_first>);
    if (other != cudaSuccess) return other;
  }
  return device::load(&update_tiles<Rule, Moments::Format::blockwise8>);
}

using Launch = cudaError_t (*)(cudaStream_t, const Formats&, const Coefficients&, const Streams&);
using Load = cudaError_t (*)();

template <std::size_t... row>
constexpr std::array<Launch, sizeof...(row)> launches(std::index_sequence<row...>) {
  return {launch_rule<cpu_adam::Rule<cpu_adam::kOptimizers[row].type>>...};
}
template <std::size_t... row>
constexpr std::array<Load, sizeof...(row)> loads(std::index_sequence<row...>) {
  return {load_rule<cpu_adam::Rule<cpu_adam::kOptimizers[row].type>>...};
}
using Rows = std::make_index_sequence<cpu_adam::kOptimizers.size()>;

}  // namespace

cudaError_t update(cudaStream_t stream, cpu_adam::Optimizer optimizer, const Formats& formats,
                   const Coefficients& coefficients, const Streams& streams) {
  if (streams.size == 0) return cudaSuccess;
  static constexpr auto kLaunches = launches(Rows());
  return kLaunches[static_cast<std::size_t>(optimizer)](stream, formats, coefficients, streams);
}

cudaError_t load_updates() {
  for (const Load load : loads(Rows())) {
    const cudaError_t code = load();
    if (code != cudaSuccess) return code;
  }
  return cudaSuccess;
}

}  // namespace ballast::update::cuda
