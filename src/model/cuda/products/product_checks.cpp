#include "src/model/cuda/products/product_checks.h"

#include <algorithm>
#include <span>
#include <utility>

#include "ballast/core/dtype.h"

#include "src/model/cuda/products/plain_product.h"
#include "src/model/cuda/products/whole_eights.h"

namespace ballast::model {
namespace cuda {
namespace {

using device::check_cuda;

thread_local ProductChecks* current = nullptr;

/// Rows at the start and at the end of a result.
constexpr std::size_t kRows = 64;

/// Makes `checks` those of this thread while it exists.
class Current {
 public:
  explicit Current(ProductChecks& checks) { current = &checks; }
  ~Current() { current = nullptr; }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;
};

/// Copies rows of `width` bytes that are `step` bytes apart from device memory, next to each other.
std::vector<std::byte> fetch_rows(cudaStream_t stream, const void* from, std::size_t step,
                                  std::size_t width, std::size_t count) {
  std::vector<std::byte> bytes(width * count);
  for (std::size_t row = 0; row < count; ++row) {
    check_cuda(cudaMemcpyAsync(bytes.data() + row * width,
                               static_cast<const std::byte*>(from) + row * step, width,
                               cudaMemcpyDeviceToHost, stream),
               "fetching a product");
  }
  check_cuda(cudaStreamSynchronize(stream), "fetching a product");
  return bytes;
}

void add(std::span<const std::byte> found, std::span<const std::byte> expected, DType type,
         DifferenceSum& sum) {
  with_training_type(type, [&](auto value) {
    using T = decltype(value);
    const auto* const a = reinterpret_cast<const T*>(found.data());
    const auto* const b = reinterpret_cast<const T*>(expected.data());
    const auto widened = [](T one) -> double {
      if constexpr (kTypeOf<T> == DType::f32) {
        return one;
      } else {
        return to_float(one);
      }
    };
    for (std::size_t i = 0; i < found.size() / sizeof(T); ++i)
      sum.add(widened(a[i]), widened(b[i]));
  });
}

}  // namespace

ProductChecks* ProductChecks::of_this_thread() {
  return current;
}

std::vector<ProductChecks::Rows> ProductChecks::expect(cudaStream_t stream, const Extents& e,
                                                       const Matrix& a, const Matrix& b,
                                                       const Matrix& d, const Extras& extras) {
  const std::size_t flags = static_cast<std::size_t>(extras.addend != nullptr) |
                            static_cast<std::size_t>(extras.bias != nullptr) << 1U;
  if (!seen_.insert(product_key(e, a, b, d, flags)).second) return {};
  const std::size_t head = std::min(e.m, kRows);
  const std::size_t tail = std::min(e.m - head, kRows);
  std::vector<Rows> all;
  all.push_back({.first = 0, .count = head});
  if (tail > 0) all.push_back({.first = e.m - tail, .count = tail});
  const std::size_t width = e.n * size_of(d.type);
  for (Rows& rows : all) {
    rows.expected = take_trial_memory(rows.count * width);
    if (rows.expected == nullptr) continue;
    if (extras.addend != nullptr) {
      Matrix addend = d;
      addend.data = extras.addend;
      const std::vector<std::byte> part =
          fetch_rows(stream, from_element(addend, rows.first, 0).data, d.row_step * size_of(d.type),
                     width, rows.count);
      check_cuda(cudaMemcpyAsync(rows.expected.get(), part.data(), part.size(),
                                 cudaMemcpyHostToDevice, stream),
                 "copying an addend");
      check_cuda(cudaStreamSynchronize(stream), "copying an addend");
    }
    const Matrix to = {.data = rows.expected.get(), .type = d.type, .row_step = e.n};
    check_cuda(plain_product(stream, {rows.count, e.n, e.k}, from_element(a, rows.first, 0), b, to,
                             extras.addend == nullptr ? nullptr : to.data, extras.bias),
               "plain product");
  }
  return all;
}

void ProductChecks::compare(cudaStream_t stream, const Extents& e, const Matrix& d,
                            const std::vector<Rows>& rows, std::string name) {
  if (rows.empty()) return;
  ProductCheck check = {.product = std::move(name), .wide = d.type == DType::f32, .compared = true};
  DifferenceSum sum;
  const std::size_t width = e.n * size_of(d.type);
  for (const Rows& part : rows) {
    if (part.expected == nullptr) {
      check.compared = false;
      continue;
    }
    const auto found = fetch_rows(stream, from_element(d, part.first, 0).data,
                                  d.row_step * size_of(d.type), width, part.count);
    const auto expected = fetch_rows(stream, part.expected.get(), width, width, part.count);
    add(found, expected, d.type, sum);
  }
  check.difference = sum.result();
  all_.push_back(std::move(check));
}

}  // namespace cuda

std::vector<ProductCheck> check_products(const std::function<void()>& work) {
  cuda::ProductChecks checks;
  const cuda::Current current(checks);
  work();
  return checks.all();
}

}  // namespace ballast::model
