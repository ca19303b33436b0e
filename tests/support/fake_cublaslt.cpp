#include "tests/support/fake_cublaslt.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <vector>

#include "ballast/core/dtype.h"

#include "src/device/cuda/libraries.h"
#include "tests/support/fake_cuda.h"
#include "tests/support/fake_memory.h"
#include "tests/support/fake_stream.h"

namespace ballast::device {
namespace {

using test::FakeCublasLt;
using test::FakeCuda;

struct Layout {
  cudaDataType_t type;
  std::uint64_t rows;
  std::uint64_t columns;
  std::int64_t leading;
};
std::uint64_t bytes_of(const Layout& layout) {
  return layout.type == CUDA_R_32F ? 4 : 2;
}
struct Operation {
  cublasComputeType_t compute;
  cudaDataType_t scale;
  cublasOperation_t transpose_a = CUBLAS_OP_N;
  cublasOperation_t transpose_b = CUBLAS_OP_N;
  cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  const void* bias = nullptr;
};
struct Preference {
  std::uint64_t workspace = 0;
  std::uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_MASK;
  std::array<std::uint32_t, 4> alignments = {256, 256, 256, 256};
};
/// The content of a cublasLtMatmulAlgo_t.
struct Algorithm {
  std::uint64_t problem;
  std::uint64_t workspace;
  std::uint64_t place;
  std::array<std::uint32_t, 4> alignments;
};
static_assert(sizeof(Algorithm) <= sizeof(cublasLtMatmulAlgo_t));

template <class T, class Handle>
T& as(Handle handle) {
  return *reinterpret_cast<T*>(handle);
}
template <class Handle, class T>
cublasStatus_t make(Handle* handle, T value) {
  *handle = reinterpret_cast<Handle>(new T(value));
  ++FakeCublasLt::alive;
  return CUBLAS_STATUS_SUCCESS;
}
template <class T, class Handle>
cublasStatus_t destroy(Handle handle) {
  delete &as<T>(handle);
  --FakeCublasLt::alive;
  return CUBLAS_STATUS_SUCCESS;
}
template <class T>
cublasStatus_t set(T& to, const void* from, std::size_t size) {
  if (size != sizeof to) return CUBLAS_STATUS_INVALID_VALUE;
  std::memcpy(&to, from, size);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t create_operation(cublasLtMatmulDesc_t* made, cublasComputeType_t compute,
                                cudaDataType_t scale) {
  return make(made, Operation{.compute = compute, .scale = scale});
}
cublasStatus_t set_operation(cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t what,
                             const void* value, std::size_t size) {
  auto& to = as<Operation>(operation);
  if (what == CUBLASLT_MATMUL_DESC_TRANSA) return set(to.transpose_a, value, size);
  if (what == CUBLASLT_MATMUL_DESC_TRANSB) return set(to.transpose_b, value, size);
  if (what == CUBLASLT_MATMUL_DESC_EPILOGUE) return set(to.epilogue, value, size);
  if (what == CUBLASLT_MATMUL_DESC_BIAS_POINTER) return set(to.bias, value, size);
  return CUBLAS_STATUS_NOT_SUPPORTED;
}
cublasStatus_t create_layout(cublasLtMatrixLayout_t* made, cudaDataType_t type, std::uint64_t rows,
                             std::uint64_t columns, std::int64_t leading) {
  return make(made, Layout{type, rows, columns, leading});
}
cublasStatus_t create_preference(cublasLtMatmulPreference_t* made) {
  return make(made, Preference{});
}
cublasStatus_t set_preference(cublasLtMatmulPreference_t preference,
                              cublasLtMatmulPreferenceAttributes_t what, const void* value,
                              std::size_t size) {
  auto& to = as<Preference>(preference);
  switch (what) {
    case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES:
      return set(to.workspace, value, size);
    case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK:
      return set(to.reductions, value, size);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES:
      return set(to.alignments[0], value, size);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES:
      return set(to.alignments[1], value, size);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES:
      return set(to.alignments[2], value, size);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES:
      return set(to.alignments[3], value, size);
    default:
      return CUBLAS_STATUS_NOT_SUPPORTED;
  }
}

/// The descriptors of a product.
struct Problem {
  const Operation& operation;
  const Layout& a;
  const Layout& b;
  const Layout& c;
  const Layout& d;

  [[nodiscard]] std::uint64_t depth() const {
    return operation.transpose_a == CUBLAS_OP_N ? a.columns : a.rows;
  }
  [[nodiscard]] cublasStatus_t status() const {
    const bool straight_a = operation.transpose_a == CUBLAS_OP_N;
    const bool straight_b = operation.transpose_b == CUBLAS_OP_N;
    if ((straight_a ? a.rows : a.columns) != d.rows) return CUBLAS_STATUS_INVALID_VALUE;
    if ((straight_b ? b.columns : b.rows) != d.columns) return CUBLAS_STATUS_INVALID_VALUE;
    if ((straight_b ? b.rows : b.columns) != depth()) return CUBLAS_STATUS_INVALID_VALUE;
    if (c.rows != d.rows || c.columns != d.columns) return CUBLAS_STATUS_INVALID_VALUE;
    for (const Layout* layout : {&a, &b, &c, &d}) {
      if (layout->rows == 0 || layout->columns == 0) return CUBLAS_STATUS_INVALID_VALUE;
      if (layout->leading < static_cast<std::int64_t>(layout->rows)) {
        return CUBLAS_STATUS_INVALID_VALUE;
      }
    }
    const bool known = a.type == CUDA_R_32F || a.type == CUDA_R_16BF || a.type == CUDA_R_16F;
    if (!known || b.type != a.type || c.type != d.type) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (d.type != a.type && d.type != CUDA_R_32F) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (operation.compute != CUBLAS_COMPUTE_32F || operation.scale != CUDA_R_32F) {
      return CUBLAS_STATUS_NOT_SUPPORTED;
    }
    const bool bias = operation.epilogue == CUBLASLT_EPILOGUE_BIAS;
    if (!bias && operation.epilogue != CUBLASLT_EPILOGUE_DEFAULT) {
      return CUBLAS_STATUS_NOT_SUPPORTED;
    }
    return bias && operation.bias == nullptr ? CUBLAS_STATUS_INVALID_VALUE : CUBLAS_STATUS_SUCCESS;
  }
  /// Number of the algorithm, equal for all problems to which it applies.
  [[nodiscard]] std::uint64_t number() const {
    std::uint64_t hash = 17;
    const auto add = [&](auto value) {
      hash = (hash ^ static_cast<std::uint64_t>(value)) * 0x100000001b3U;
    };
    add(operation.transpose_a);
    add(operation.transpose_b);
    add(operation.epilogue);
    for (const Layout* layout : {&a, &b, &c, &d}) {
      add(layout->type);
      add(layout->rows);
      add(layout->columns);
      add(layout->leading);
    }
    return hash;
  }
};

cublasStatus_t find_algorithms(cublasLtHandle_t, cublasLtMatmulDesc_t operation,
                               cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                               cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                               cublasLtMatmulPreference_t wanted, int most,
                               cublasLtMatmulHeuristicResult_t* found, int* count) {
  if (FakeCuda::refuses("cublasLtMatmulAlgoGetHeuristic")) return CUBLAS_STATUS_INTERNAL_ERROR;
  ++FakeCublasLt::searches;
  const auto& preference = as<Preference>(wanted);
  FakeCublasLt::reductions = preference.reductions;
  FakeCublasLt::workspace = preference.workspace;
  std::copy(preference.alignments.begin(), preference.alignments.end(),
            FakeCublasLt::alignments.begin());
  *count = 0;
  const Problem problem = {as<Operation>(operation), as<Layout>(a), as<Layout>(b), as<Layout>(c),
                           as<Layout>(d)};
  const cublasStatus_t told = FakeCublasLt::next_search.exchange(CUBLAS_STATUS_SUCCESS);
  if (told != CUBLAS_STATUS_SUCCESS) return told;
  if (problem.status() != CUBLAS_STATUS_SUCCESS) return problem.status();
  *count = std::min(most, FakeCublasLt::found.load());
  for (int i = 0; i < *count; ++i) {
    const Algorithm algorithm = {.problem = problem.number(),
                                 .workspace = preference.workspace,
                                 .place = static_cast<std::uint64_t>(i),
                                 .alignments = preference.alignments};
    found[i] = {};
    std::memcpy(&found[i].algo, &algorithm, sizeof algorithm);
    found[i].workspaceSize = algorithm.workspace;
  }
  return CUBLAS_STATUS_SUCCESS;
}

double load(const void* from, cudaDataType_t type, std::size_t at) {
  if (type == CUDA_R_32F) return static_cast<const float*>(from)[at];
  return type == CUDA_R_16F ? to_float(static_cast<const F16*>(from)[at])
                            : to_float(static_cast<const Bf16*>(from)[at]);
}
void store(void* to, cudaDataType_t type, std::size_t at, double value) {
  if (type == CUDA_R_32F) {
    static_cast<float*>(to)[at] = static_cast<float>(value);
  } else if (type == CUDA_R_16F) {
    static_cast<F16*>(to)[at] = to_f16(static_cast<float>(value));
  } else {
    static_cast<Bf16*>(to)[at] = to_bf16(static_cast<float>(value));
  }
}
std::size_t place(const Layout& layout, std::size_t row, std::size_t column) {
  return row + column * static_cast<std::size_t>(layout.leading);
}

/// All elements of a matrix, stored so that the elements of one sum are contiguous.
std::vector<double> gather(const void* from, const Layout& layout, bool along_rows) {
  std::vector<double> values;
  values.reserve(layout.rows * layout.columns);
  const std::size_t outer = along_rows ? layout.rows : layout.columns;
  const std::size_t inner = along_rows ? layout.columns : layout.rows;
  for (std::size_t i = 0; i < outer; ++i) {
    for (std::size_t j = 0; j < inner; ++j) {
      values.push_back(
          load(from, layout.type, along_rows ? place(layout, i, j) : place(layout, j, i)));
    }
  }
  return values;
}

/// Returns whether the GPU may access `count` elements from `start` on. Without a seed, tests may
/// use any memory as that of the GPU.
bool is_accessible(const char* what, const void* start, cudaDataType_t type, std::size_t count) {
  if (FakeCuda::seed == 0) return true;
  const std::size_t bytes = count * (type == CUDA_R_32F ? 4 : 2);
  if (test::FakeMemory::where(start, bytes) == test::FakeMemory::Where::inside) return true;
  FakeCuda::complain(std::string("cublasLtMatmul: ") + what +
                     " is not in one allocation of the GPU");
  return false;
}

/// A product whose call was accepted. Copies what the caller may change or destroy.
struct Product {
  Operation operation;
  std::array<Layout, 4> layouts;
  const void* a;
  const void* b;
  const void* c;
  void* d;
  float factor;
  float old_factor;
  void* workspace;
  std::size_t workspace_size;
  double milliseconds;

  [[nodiscard]] bool is_accessible() const {
    const auto matrix = [](const char* what, const void* start, const Layout& layout) {
      return device::is_accessible(
          what, start, layout.type,
          (layout.columns - 1) * static_cast<std::size_t>(layout.leading) + layout.rows);
    };
    const bool has_bias = operation.epilogue == CUBLASLT_EPILOGUE_BIAS;
    return matrix("A", a, layouts[0]) && matrix("B", b, layouts[1]) &&
           (old_factor == 0.0F || matrix("C", c, layouts[2])) && matrix("D", d, layouts[3]) &&
           (!has_bias ||
            device::is_accessible("the bias", operation.bias, layouts[3].type, layouts[3].rows)) &&
           (workspace_size == 0 ||
            device::is_accessible("the workspace", workspace, CUDA_R_16BF, workspace_size / 2));
  }
  void run() const {
    FakeCuda::milliseconds += milliseconds;
    if (workspace != nullptr) {
      std::memset(workspace, 0x7f, std::min<std::size_t>(workspace_size, 4096));
    }
    const Layout& out = layouts[3];
    const bool straight_a = operation.transpose_a == CUBLAS_OP_N;
    const auto rows = gather(a, layouts[0], straight_a);
    const auto columns = gather(b, layouts[1], operation.transpose_b != CUBLAS_OP_N);
    const std::size_t depth = straight_a ? layouts[0].columns : layouts[0].rows;
    for (std::size_t column = 0; column < out.columns; ++column) {
      for (std::size_t row = 0; row < out.rows; ++row) {
        double sum = 0.0;
        for (std::size_t k = 0; k < depth; ++k)
          sum += rows[row * depth + k] * columns[column * depth + k];
        sum *= double{factor};
        if (old_factor != 0.0F) {
          sum += double{old_factor} * load(c, layouts[2].type, place(layouts[2], row, column));
        }
        if (operation.epilogue == CUBLASLT_EPILOGUE_BIAS) {
          sum += load(operation.bias, out.type, row);
        }
        store(d, out.type, place(out, row, column), sum);
      }
    }
  }
};

cublasStatus_t matmul(cublasLtHandle_t, cublasLtMatmulDesc_t operation, const void* alpha,
                      const void* a, cublasLtMatrixLayout_t a_layout, const void* b,
                      cublasLtMatrixLayout_t b_layout, const void* beta, const void* c,
                      cublasLtMatrixLayout_t c_layout, void* d, cublasLtMatrixLayout_t d_layout,
                      const cublasLtMatmulAlgo_t* algo, void* workspace, std::size_t size,
                      cudaStream_t stream) {
  if (FakeCuda::refuses("cublasLtMatmul") || FakeCuda::fault != cudaSuccess) {
    return CUBLAS_STATUS_EXECUTION_FAILED;
  }
  const cublasStatus_t told = FakeCublasLt::next_product.exchange(CUBLAS_STATUS_SUCCESS);
  if (told != CUBLAS_STATUS_SUCCESS) return told;
  const Problem problem = {as<Operation>(operation), as<Layout>(a_layout), as<Layout>(b_layout),
                           as<Layout>(c_layout), as<Layout>(d_layout)};
  if (problem.status() != CUBLAS_STATUS_SUCCESS) return problem.status();
  Algorithm algorithm = {};
  std::memcpy(&algorithm, algo, sizeof algorithm);
  if (algorithm.problem != problem.number()) return CUBLAS_STATUS_INVALID_VALUE;
  ++FakeCublasLt::tried;
  const auto chosen = static_cast<int>(algorithm.place);
  FakeCublasLt::last_algorithm = chosen;
  if (chosen < FakeCublasLt::refused || chosen == FakeCublasLt::also_refused) {
    return CUBLAS_STATUS_NOT_SUPPORTED;
  }
  const std::array<const void*, 4> pointers = {a, b, c, d};
  const std::array<Layout, 4> layouts = {problem.a, problem.b, problem.c, problem.d};
  for (std::size_t i = 0; i < pointers.size(); ++i) {
    const auto address = reinterpret_cast<std::uintptr_t>(pointers[i]);
    // Stricter than cuBLASLt, which respects the leading dimension in its choice of an algorithm.
    const std::uint64_t step =
        static_cast<std::uint64_t>(layouts[i].leading) * bytes_of(layouts[i]);
    if (address % algorithm.alignments[i] != 0 || step % algorithm.alignments[i] != 0) {
      return CUBLAS_STATUS_EXECUTION_FAILED;
    }
  }
  if (size < algorithm.workspace || reinterpret_cast<std::uintptr_t>(workspace) % 256 != 0) {
    return CUBLAS_STATUS_INVALID_VALUE;
  }
  const Product product = {.operation = problem.operation,
                           .layouts = layouts,
                           .a = a,
                           .b = b,
                           .c = c,
                           .d = d,
                           .factor = *static_cast<const float*>(alpha) * FakeCublasLt::factor,
                           .old_factor = *static_cast<const float*>(beta),
                           .workspace = workspace,
                           .workspace_size = size,
                           .milliseconds = FakeCublasLt::milliseconds[algorithm.place]};
  if (!product.is_accessible()) return CUBLAS_STATUS_INVALID_VALUE;
  test::on_stream(stream, [product] { product.run(); });
  return CUBLAS_STATUS_SUCCESS;
}

const char* status_name(cublasStatus_t status) {
  return status == CUBLAS_STATUS_NOT_SUPPORTED      ? "CUBLAS_STATUS_NOT_SUPPORTED"
         : status == CUBLAS_STATUS_INVALID_VALUE    ? "CUBLAS_STATUS_INVALID_VALUE"
         : status == CUBLAS_STATUS_EXECUTION_FAILED ? "CUBLAS_STATUS_EXECUTION_FAILED"
                                                    : "CUBLAS_STATUS of a fake";
}
std::size_t version() {
  return CUBLAS_VERSION;
}
cublasStatus_t create(cublasLtHandle_t* made) {
  if (FakeCuda::refuses("cublasLtCreate")) return CUBLAS_STATUS_NOT_INITIALIZED;
  if (!FakeCuda::start_library(FakeCuda::started_cublaslt)) return CUBLAS_STATUS_ALLOC_FAILED;
  return make(made, 0);
}

}  // namespace

const CublasLt& cublaslt() {
  static const CublasLt fake = {
      .version = &version,
      .status_name = &status_name,
      .create = &create,
      .destroy = &destroy<int, cublasLtHandle_t>,
      .matmul = &matmul,
      .find_algorithms = &find_algorithms,
      .create_operation = &create_operation,
      .destroy_operation = &destroy<Operation, cublasLtMatmulDesc_t>,
      .set_operation = &set_operation,
      .create_layout = &create_layout,
      .destroy_layout = &destroy<Layout, cublasLtMatrixLayout_t>,
      .create_preference = &create_preference,
      .destroy_preference = &destroy<Preference, cublasLtMatmulPreference_t>,
      .set_preference = &set_preference,
  };
  return fake;
}
std::string_view cublaslt_refusal() {
  return test::FakeCuda::missing_library;
}
std::string_view cublaslt_file() {
  return "";
}

}  // namespace ballast::device
