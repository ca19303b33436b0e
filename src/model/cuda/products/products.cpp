#include "src/model/cuda/products/products.h"

#include <algorithm>
#include <array>
#include <bit>
#include <numeric>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "ballast/core/error.h"

#include "src/device/cuda/libraries.h"
#include "src/device/cuda/runtime.h"

namespace ballast::model::cuda {

using device::CublasLt;

namespace {

/// Alignment of matrices, addends and biases.
constexpr std::uint32_t kMatrixAlignment = 16;

/// Returns the alignment of all rows (or columns) of `matrix` in bytes, at most kMatrixAlignment.
std::uint32_t alignment_of(const Matrix& matrix) {
  const std::size_t step = matrix.column_step == 1 ? matrix.row_step : matrix.column_step;
  return std::gcd(kMatrixAlignment,
                  static_cast<std::uint32_t>(step * size_of(matrix.type) % kMatrixAlignment));
}

/// Deletes a cuBLASLt object.
template <class T>
struct End {
  cublasStatus_t (*end)(T*) = nullptr;
  void operator()(T* object) const noexcept { static_cast<void>(end(object)); }
};
template <class T>
using Owned = std::unique_ptr<std::remove_pointer_t<T>, End<std::remove_pointer_t<T>>>;

ProductKey key_of(const Extents& e, const Matrix& a, const Matrix& b, const Matrix& d,
                  const Extras& extras) {
  return product_key(e, a, b, d,
                     static_cast<std::size_t>(extras.addend != nullptr) |
                         static_cast<std::size_t>(extras.bias != nullptr) << 1U);
}

/// A prepared product. cuBLASLt's matrices are column-major, so it sees the transposes of ours and
/// computes d^T = b^T a^T. Its A is our b, its B our a, its rows our columns.
struct ProductPlan {
  Owned<cublasLtMatmulDesc_t> operation;
  Owned<cublasLtMatrixLayout_t> a;
  Owned<cublasLtMatrixLayout_t> b;
  Owned<cublasLtMatrixLayout_t> d;
  /// The library's choices, best first, preceded by the timed choice if there is one. The product
  /// uses the first that the library does not refuse to run, and no other afterwards, so its bits
  /// never change.
  std::vector<cublasLtMatmulAlgo_t> algorithms;
  std::size_t used = 0;
  bool settled = false;
};

/// Number of algorithms to request.
constexpr int kMaxAlgorithms = 8;

/// Returns whether the library refused to run an algorithm, so that nothing was enqueued.
bool refused(cublasStatus_t status) {
  return status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_ARCH_MISMATCH;
}

cudaDataType_t data_type(DType type) {
  switch (type) {
    case DType::f32:
      return CUDA_R_32F;
    case DType::bf16:
      return CUDA_R_16BF;
    case DType::f16:
      break;
  }
  return CUDA_R_16F;
}

bool by_rows(const Matrix& matrix) {
  return matrix.column_step == 1;
}

/// Calls to cuBLASLt for one product.
class Calls {
 public:
  Calls(const CublasLt& lt, const Extents& extents, DType type)
      : lt_(lt), extents_(extents), type_(type) {}

  void check(cublasStatus_t status) const {
    if (status == CUBLAS_STATUS_SUCCESS) return;
    throw Error(
        ErrorCategory::device,
        fmt::format("matrix product [{}, {}, {}] of {}: cuBLASLt: {}{}", extents_.m, extents_.n,
                    extents_.k, to_string(type_), lt_.status_name(status),
                    status == CUBLAS_STATUS_EXECUTION_FAILED ? device::fault_advice() : ""));
  }

  [[nodiscard]] Owned<cublasLtHandle_t> handle() const {
    cublasLtHandle_t made = nullptr;
    check(lt_.create(&made));
    return {made, {lt_.destroy}};
  }

  [[nodiscard]] ProductPlan plan(cublasLtHandle_t handle, const Matrix& a, const Matrix& b,
                                 const Matrix& d, const Extras& extras) const {
    ProductPlan made = {.operation = operation(a, b, extras),
                        .a = layout(a, extents_.m, extents_.k),
                        .b = layout(b, extents_.k, extents_.n),
                        .d = layout(d, extents_.m, extents_.n)};
    const auto wanted = preference(a, b, d);
    std::array<cublasLtMatmulHeuristicResult_t, kMaxAlgorithms> found = {};
    int count = 0;
    check(lt_.find_algorithms(handle, made.operation.get(), made.b.get(), made.a.get(),
                              made.d.get(), made.d.get(), wanted.get(), kMaxAlgorithms,
                              found.data(), &count));
    for (const auto& one : std::span(found).first(static_cast<std::size_t>(count))) {
      if (one.state == CUBLAS_STATUS_SUCCESS) made.algorithms.push_back(one.algo);
    }
    if (made.algorithms.empty()) check(count > 0 ? found[0].state : CUBLAS_STATUS_NOT_SUPPORTED);
    return made;
  }

  template <class T>
  void set(cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t what, T value) const {
    check(lt_.set_operation(operation, what, &value, sizeof value));
  }

 private:
  [[nodiscard]] Owned<cublasLtMatrixLayout_t> layout(const Matrix& matrix, std::size_t rows,
                                                     std::size_t columns) const {
    cublasLtMatrixLayout_t made = nullptr;
    const bool straight = by_rows(matrix);
    const std::size_t step = straight ? matrix.row_step : matrix.column_step;
    const std::size_t size = straight ? columns : rows;
    // A transposed column, as in an adapter of rank 1, has the step 1, which is less than its size.
    check(lt_.create_layout(&made, data_type(matrix.type), size, straight ? rows : columns,
                            static_cast<std::int64_t>(std::max(step, size))));
    return {made, {lt_.destroy_layout}};
  }

  [[nodiscard]] Owned<cublasLtMatmulDesc_t> operation(const Matrix& a, const Matrix& b,
                                                      const Extras& extras) const {
    cublasLtMatmulDesc_t made = nullptr;
    // Correct for fp32 matrices too: only CUBLAS_COMPUTE_32F_FAST_TF32 and similar types round
    // them.
    check(lt_.create_operation(&made, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    Owned<cublasLtMatmulDesc_t> owned(made, {lt_.destroy_operation});
    const auto transposition = [](const Matrix& m) {
      return by_rows(m) ? CUBLAS_OP_N : CUBLAS_OP_T;
    };
    set(made, CUBLASLT_MATMUL_DESC_TRANSA, transposition(b));
    set(made, CUBLASLT_MATMUL_DESC_TRANSB, transposition(a));
    if (extras.bias != nullptr) {
      set(made, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
      // The search needs the alignment of the bias, which is the same for all.
      set(made, CUBLASLT_MATMUL_DESC_BIAS_POINTER, reinterpret_cast<const void*>(kMatrixAlignment));
    }
    return owned;
  }

  [[nodiscard]] Owned<cublasLtMatmulPreference_t> preference(const Matrix& a, const Matrix& b,
                                                             const Matrix& d) const {
    cublasLtMatmulPreference_t made = nullptr;
    check(lt_.create_preference(&made));
    Owned<cublasLtMatmulPreference_t> owned(made, {lt_.destroy_preference});
    const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t what, auto value) {
      check(lt_.set_preference(made, what, &value, sizeof value));
    };
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, std::uint64_t{Products::kWorkspace});
    // Allows only schemes that store parts of a sum in fp32 in the workspace and add them in a
    // separate step. INPLACE adds to the output in an unspecified order, and OUTPUT_TYPE rounds the
    // parts to the output's type first.
    prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
           std::uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment_of(b));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment_of(a));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment_of(d));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment_of(d));
    return owned;
  }

  const CublasLt& lt_;
  const Extents& extents_;
  DType type_;
};

void check_arguments(const Extents& extents, const Matrix& a, const Matrix& b, const Matrix& d,
                     const Extras& extras) {
  expects(a.type == b.type, "matrix product: a and b differ in type");
  expects(d.type == a.type || (d.type == DType::f32 && extras.bias == nullptr),
          "matrix product: unsupported type of the result");
  expects(d.column_step == 1 && extents.k > 0, "matrix product: unsupported shape or layout");
}

/// One call of multiply() and its plan.
struct Call {
  cudaStream_t stream;
  const Extents& extents;
  const Matrix& a;
  const Matrix& b;
  const Matrix& d;
  const Extras& extras;
  ProductPlan& plan;
};

/// Returns the bytes from the first to the last element of a result.
Bytes extent_bytes(const Extents& extents, const Matrix& d) {
  return ((extents.m - 1) * d.row_step + extents.n) * size_of(d.type);
}

/// Describes the product with everything that decides which algorithms are possible.
std::string describe(const Call& call) {
  const auto matrix = [](const Matrix& m) {
    return by_rows(m) ? fmt::format("{} rows {} apart", to_string(m.type), m.row_step)
                      : fmt::format("{} columns {} apart", to_string(m.type), m.column_step);
  };
  const Extents& e = call.extents;
  return fmt::format("[{}, {}, {}] of {}, {}, into {}{}{}", e.m, e.n, e.k, matrix(call.a),
                     matrix(call.b), matrix(call.d),
                     call.extras.addend == nullptr ? "" : ", with an addend",
                     call.extras.bias == nullptr ? "" : ", with a bias");
}

}  // namespace

struct Products::Cache {
  explicit Cache(std::shared_ptr<ProductChoices> kept) : choices(std::move(kept)) {}

  const CublasLt& lt = device::cublaslt();
  std::shared_ptr<ProductChoices> choices;
  std::string library;  ///< library name, for choices
  void* workspace = nullptr;
  // Created by the first product, because its thread has the right current device.
  Owned<cublasLtHandle_t> handle;
  std::unordered_map<ProductKey, ProductPlan, ProductKeyHash> plans;

  ProductPlan& plan(const Calls& calls, const Extents& extents, const Matrix& a, const Matrix& b,
                    const Matrix& d, const Extras& extras) {
    const ProductKey key = key_of(extents, a, b, d, extras);
    auto found = plans.find(key);
    if (found == plans.end()) {
      if (handle == nullptr) handle = calls.handle();
      found = plans.emplace(key, calls.plan(handle.get(), a, b, d, extras)).first;
    }
    return found->second;
  }

  cublasStatus_t run(const Call& call, std::size_t algorithm, void* out) const {
    const ProductPlan& plan = call.plan;
    const float one = 1.0F;
    const void* const addend = call.extras.addend;
    const float beta = addend == nullptr ? 0.0F : 1.0F;
    return lt.matmul(handle.get(), plan.operation.get(), &one, call.b.data, plan.b.get(),
                     call.a.data, plan.a.get(), &beta, addend == nullptr ? out : addend,
                     plan.d.get(), out, plan.d.get(), &plan.algorithms[algorithm], workspace,
                     kWorkspace, call.stream);
  }

  /// Returns the index of the fastest algorithm. The result of `call` is either unchanged or
  /// correct.
  std::size_t time(const Calls& calls, const Call& call) const {
    void* out = const_cast<void*>(call.d.data);
    TrialMemory own;
    if (call.extras.addend == call.d.data) {
      const Bytes bytes = extent_bytes(call.extents, call.d);
      own = take_trial_memory(bytes);
      if (own == nullptr) {
        log(LogLevel::info,
            fmt::format("products: {} is not timed, because that needs {} of device memory in "
                        "addition to ballast.device_bytes; using the library's choice",
                        describe(call), format_bytes(bytes)));
        return 0;
      }
      out = own.get();
    }
    const auto enqueue = [&](std::size_t algorithm) {
      const cublasStatus_t status = run(call, algorithm, out);
      if (refused(status)) return false;
      calls.check(status);
      return true;
    };
    const auto found = fastest_way(call.stream, call.plan.algorithms.size(), enqueue);
    if (!found) calls.check(CUBLAS_STATUS_NOT_SUPPORTED);
    return *found;
  }

  /// Moves the fastest algorithm, now or in an earlier run, to the front.
  void choose(const Calls& calls, const Call& call) {
    auto& algorithms = call.plan.algorithms;
    if (choices == nullptr || algorithms.size() < 2) return;
    if (library.empty()) library = fmt::format("{}; cuBLASLt {}", current_gpu(), lt.version());
    std::vector<ProductAlgorithm> candidates;
    candidates.reserve(algorithms.size());
    for (const auto& one : algorithms) candidates.push_back(std::bit_cast<ProductAlgorithm>(one));
    const std::size_t chosen =
        choices->choose(library, describe(call), candidates, [&] { return time(calls, call); });
    std::swap(algorithms.front(), algorithms[chosen]);
  }
};

Products::Products(std::shared_ptr<ProductChoices> choices, KernelSet set)
    : cache_(set == KernelSet::plain ? nullptr : std::make_unique<Cache>(std::move(choices))) {}
Products::~Products() = default;

void Products::set_workspace(void* workspace) {
  if (cache_) cache_->workspace = workspace;
}

void Products::multiply(cudaStream_t stream, const Extents& extents, const Matrix& a,
                        const Matrix& b, const Matrix& d, const Extras& extras) {
  if (extents.m == 0 || extents.n == 0) return;
  check_arguments(extents, a, b, d, extras);
  if (!cache_) {
    const cudaError_t code = plain_product(stream, extents, a, b, d, extras.addend, extras.bias);
    if (code == cudaSuccess) return;
    device::check_cuda(code, fmt::format("matrix product [{}, {}, {}] of {}", extents.m, extents.n,
                                         extents.k, to_string(a.type)));
  }
  expects(cache_->workspace != nullptr, "matrix product: set_workspace() was not called");
  const Calls calls(cache_->lt, extents, a.type);
  ProductPlan& plan = cache_->plan(calls, extents, a, b, d, extras);
  if (extras.bias != nullptr) {
    calls.set(plan.operation.get(), CUBLASLT_MATMUL_DESC_BIAS_POINTER, extras.bias);
  }
  const Call call = {stream, extents, a, b, d, extras, plan};
  ProductChecks* const checks = ProductChecks::of_this_thread();
  std::vector<ProductChecks::Rows> expected;
  if (checks != nullptr) expected = checks->expect(stream, extents, a, b, d, extras);
  if (!plan.settled) cache_->choose(calls, call);
  const auto run = [&] { return cache_->run(call, plan.used, const_cast<void*>(d.data)); };
  cublasStatus_t status = run();
  while (!plan.settled && refused(status) && plan.used + 1 < plan.algorithms.size()) {
    ++plan.used;
    status = run();
  }
  calls.check(status);
  plan.settled = true;
  if (checks != nullptr) checks->compare(stream, extents, d, expected, describe(call));
}

}  // namespace ballast::model::cuda
