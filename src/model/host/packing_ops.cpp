#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>

#include "ballast/core/clocks.h"
#include "ballast/core/dtype.h"
#include "ballast/device/streams.h"
#include "ballast/model/packed_values.h"

#include "src/model/host/kernel_tables.h"
#include "src/model/host/ops.h"
#include "src/model/host/team.h"

namespace ballast::model::host {
namespace {

/// Calls find(range, statistics) for each chunk of `size` values and returns the sum. `partial`:
/// one GradientStats per kStatsChunk values.
template <class Find>
GradientStats by_stats_chunks(std::size_t size, GradientStats* partial, const Find& find) {
  const std::size_t chunks = (size + kStatsChunk - 1) / kStatsChunk;
  split(chunks, 1, [&](Range here) {
    for (std::size_t chunk = here.begin; chunk < here.end; ++chunk) {
      const std::size_t begin = chunk * kStatsChunk;
      partial[chunk] = {};
      find(Range{begin, std::min(size, begin + kStatsChunk)}, partial[chunk]);
    }
  });
  GradientStats total;
  for (std::size_t chunk = 0; chunk < chunks; ++chunk) {
    total.sum_of_squares += partial[chunk].sum_of_squares;
    total.non_finite += partial[chunk].non_finite;
  }
  return total;
}

/// Packs elements of a table. Returns whether there is a sum for one of them; if not, all are zero.
template <class T>
bool pack_rows(const TypeKernels<T>& kernels, const UnpackedGradient& from, Range range,
               T* packed) {
  const auto sum_row_at = [&](std::size_t element) {
    const std::size_t row = element / from.width;
    return row < from.rows ? from.sum_row_of[row] : kNoSumRow;
  };
  const auto end_of_row = [&](std::size_t element) {
    return std::min(range.end, (element / from.width + 1) * from.width);
  };
  bool any = false;
  GradientStats unused;
  for (std::size_t at = range.begin, end = at; at < range.end; at = end) {
    const std::uint32_t sum_row = sum_row_at(at);
    end = end_of_row(at);
    if (sum_row != kNoSumRow) {
      const float* const sums = from.sum_rows + sum_row * from.width + at % from.width;
      const float* const tied = at < from.tied_size ? from.tied + at : nullptr;
      kernels.gradients.pack(sums, tied, packed + at, end - at, &unused.sum_of_squares,
                             &unused.non_finite);
      any = true;
      continue;
    }
    while (end < range.end && sum_row_at(end) == kNoSumRow) end = end_of_row(end);
    const std::size_t tied = std::clamp(from.tied_size, at, end);
    if (tied > at) kernels.rows.convert(from.tied + at, 0, packed + at, 0, 1, tied - at);
    std::fill(packed + tied, packed + end, T());
    any = any || tied > at;
  }
  return any;
}

/// Rows of a table are packed first and then measured: the part that the tied gradient covers, then
/// the rest of the chunk.
template <class T>
GradientStats pack_gradient(const TypeKernels<T>& kernels, const UnpackedGradient& from, T* packed,
                            std::size_t size, GradientStats* partial) {
  return by_stats_chunks(size, partial, [&](Range range, GradientStats& stats) {
    const auto pack = [&](std::size_t begin, GradientStats& to) {
      if (begin == range.end) return;
      kernels.gradients.pack(from.rest + (begin - from.table), nullptr, packed + begin,
                             range.end - begin, &to.sum_of_squares, &to.non_finite);
    };
    if (range.begin >= from.table) return pack(range.begin, stats);
    const std::size_t end_of_table = std::min(from.table, range.end);
    GradientStats unused;
    const bool any = pack_rows(kernels, from, {range.begin, end_of_table}, packed);
    pack(end_of_table, unused);
    if (!any && end_of_table == range.end) return;
    const std::size_t border = std::clamp(from.tied_size, range.begin, range.end);
    for (const Range part : {Range{range.begin, border}, Range{border, range.end}}) {
      if (part.size() == 0) continue;
      kernels.gradients.measure(packed + part.begin, part.size(), &stats.sum_of_squares,
                                &stats.non_finite);
    }
  });
}

template <class T>
GradientStats measure_gradient(const GradientKernels<T>& kernels, const T* packed, std::size_t size,
                               GradientStats* partial) {
  return by_stats_chunks(size, partial, [&](Range range, GradientStats& stats) {
    kernels.measure(packed + range.begin, range.size(), &stats.sum_of_squares, &stats.non_finite);
  });
}

template <class T>
void decode_nf4(const std::byte* codes, float scale, Elems count, T* out) {
  std::array<T, 16> products;
  for (std::size_t i = 0; i < products.size(); ++i)
    products[i] = from_float<T>(scale * nf4_values()[i]);
  for (Elems i = 0; i + 1 < count; i += 2) {
    const auto pair = static_cast<unsigned>(codes[i / 2]);
    out[i] = products[pair >> 4U];
    out[i + 1] = products[pair & 0xfU];
  }
  if (count % 2 > 0) out[count - 1] = products[static_cast<unsigned>(codes[count / 2]) >> 4U];
}

template <class T>
void decode_int8(const std::byte* codes, float scale, Elems count, T* out) {
  const std::array<float, 256>& map = dynamic_map();
  for (Elems i = 0; i < count; ++i) {
    out[i] = from_float<T>(scale * map[static_cast<std::size_t>(codes[i])]);
  }
}

/// Dequantises all elements in fp32 and rounds them to T (nearest even). One kernel serves all
/// instruction sets, because elements of a 4-bit block take only 16 products.
template <class T>
void dequantize_matrix(const QuantizedMatrix& matrix, T* out) {
  const QuantizedArrays& arrays = matrix.arrays;
  const Elems block = matrix.quantization.block();
  const bool nf4 = matrix.quantization.format == Quantization::Format::nf4;
  split(arrays.scales_count, 1, [&](Range here) {
    for (Elems b = here.begin; b < here.end; ++b) {
      const Elems first = b * block;
      const Elems count = std::min<Elems>(block, arrays.elements - first);
      const float scale = scale_at(arrays, matrix.at, b);
      if (nf4) {
        decode_nf4(matrix.at + first / 2, scale, count, out + first);
      } else {
        decode_int8(matrix.at + first, scale, count, out + first);
      }
    }
  });
}

template <class T>
class HostPacking final : public PackingOps<T> {
 public:
  explicit HostPacking(State<T> state) : state_(std::move(state)) {}

  void forget_sum_rows(std::uint32_t* sum_row_of, std::size_t rows) override {
    std::fill_n(sum_row_of, rows, kNoSumRow);
  }
  void find_sum_rows(const Ids& ids, std::size_t first, std::size_t rows,
                     std::uint32_t* sum_row_of) override {
    for (std::size_t i = 0; i < state_->extents.shape.tokens(); ++i) {
      const std::size_t row = static_cast<std::size_t>(ids.tokens[i]) - first;
      if (row < rows) sum_row_of[row] = static_cast<std::uint32_t>(ids.sum_rows[i]);
    }
  }
  void pack(const UnpackedGradient& from, T* packed, std::size_t size, GradientStats* partial,
            GradientStats* stats) override {
    const KernelClock clock(KernelGroup::packing);
    const GradientStats found = pack_gradient(state_->kernels, from, packed, size, partial);
    if (stats != nullptr) *stats = found;
  }
  void measure(device::Stream& stream, const T* packed, std::size_t size, GradientStats* partial,
               GradientStats* stats) override {
    as_host(stream).enqueue([=, this] {
      const KernelClock clock(KernelGroup::packing);
      *stats = measure_gradient(state_->kernels.gradients, packed, size, partial);
    });
  }
  void encode(device::Stream& stream, const T* weights, std::size_t blocks, std::int8_t* codes,
              float* scales) override {
    as_host(stream).enqueue([=, this] {
      split(KernelGroup::elementwise, blocks, 1, [&](Range range) {
        const std::size_t at = range.begin * kCodeBlock;
        state_->kernels.codes.encode(weights + at, range.size(), codes + at, scales + range.begin);
      });
    });
  }
  void decode(device::Stream& stream, const std::int8_t* codes, const float* scales,
              std::size_t blocks, T* weights) override {
    as_host(stream).enqueue([=, this] {
      split(KernelGroup::elementwise, blocks, 1, [&](Range range) {
        const std::size_t at = range.begin * kCodeBlock;
        state_->kernels.codes.decode(codes + at, scales + range.begin, range.size(), weights + at);
      });
    });
  }
  void dequantize_base(const QuantizedMatrix& matrix, T* out) override {
    dequantize_matrix(matrix, out);
  }
  void zero(device::Stream& stream, float* values, std::size_t size) override {
    as_host(stream).enqueue([=] {
      split(KernelGroup::elementwise, size, kPage / sizeof(float),
            [&](Range r) { std::memset(values + r.begin, 0, r.size() * sizeof(float)); });
    });
  }

 private:
  State<T> state_;
};

}  // namespace

template <class T>
void add_packing_ops(const State<T>& state, DeviceOps<T>& to) {
  to.packing = std::make_shared<HostPacking<T>>(state);
}

template void add_packing_ops(const State<float>&, DeviceOps<float>&);
template void add_packing_ops(const State<Bf16>&, DeviceOps<Bf16>&);
template void add_packing_ops(const State<F16>&, DeviceOps<F16>&);

}  // namespace ballast::model::host
