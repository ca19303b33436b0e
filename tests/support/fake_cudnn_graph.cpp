#include "tests/support/fake_cudnn_graph.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <set>
#include <utility>

#include "ballast/core/dtype.h"

namespace ballast::test {
namespace {

using Four = FakeTensor::Four;

std::int64_t count_of(const Four& extents) {
  return extents[0] * extents[1] * extents[2] * extents[3];
}

/// Calls `body` with all places of a tensor of those extents.
template <class Body>
void for_places(const Four& extents, const Body& body) {
  Four at = {};
  for (at[0] = 0; at[0] < extents[0]; ++at[0]) {
    for (at[1] = 0; at[1] < extents[1]; ++at[1]) {
      for (at[2] = 0; at[2] < extents[2]; ++at[2]) {
        for (at[3] = 0; at[3] < extents[3]; ++at[3]) body(at);
      }
    }
  }
}

float rounded(float value, cudnnDataType_t type) {
  return type == CUDNN_DATA_BFLOAT16 ? to_float(to_bf16(value)) : value;
}

/// A tensor's values: those of memory where they are there, those of a virtual one here.
class Values {
 public:
  Values(const FakeTensor& tensor, void* place) : tensor_(&tensor), place_(place) {
    if (tensor.is_virtual) own_.resize(static_cast<std::size_t>(count_of(tensor.extents)));
  }
  /// Extents of 1 stand for all.
  [[nodiscard]] float get(Four at) const {
    for (std::size_t i = 0; i < 4; ++i) {
      if (tensor_->extents[i] == 1) at[i] = 0;
    }
    const std::size_t i = index(at);
    if (tensor_->is_virtual) return own_[i];
    if (tensor_->type == CUDNN_DATA_BFLOAT16) return to_float(static_cast<const Bf16*>(place_)[i]);
    return static_cast<const float*>(place_)[i];
  }
  void set(const Four& at, float value) {
    const std::size_t i = index(at);
    if (tensor_->is_virtual) {
      own_[i] = rounded(value, tensor_->type);
    } else if (tensor_->type == CUDNN_DATA_BFLOAT16) {
      static_cast<Bf16*>(place_)[i] = to_bf16(value);
    } else {
      static_cast<float*>(place_)[i] = value;
    }
  }

 private:
  [[nodiscard]] std::size_t index(const Four& at) const {
    std::int64_t sum = 0;
    for (std::size_t i = 0; i < 4; ++i) sum += at[i] * tensor_->steps[i];
    return static_cast<std::size_t>(sum);
  }
  const FakeTensor* tensor_;
  void* place_;
  std::vector<float> own_;
};

float function(const FakeOperation& operation, const Four& at, float x, float b, float condition) {
  switch (operation.mode) {
    case CUDNN_POINTWISE_MUL:
      return x * b;
    case CUDNN_POINTWISE_SUB:
      return x - b;
    case CUDNN_POINTWISE_ADD:
      return x + b;
    case CUDNN_POINTWISE_DIV:
      return x / b;
    case CUDNN_POINTWISE_EXP:
      return std::exp(x);
    case CUDNN_POINTWISE_LOG:
      return std::log(x);
    case CUDNN_POINTWISE_GEN_INDEX:
      return static_cast<float>(at[static_cast<std::size_t>(operation.axis)]);
    case CUDNN_POINTWISE_CMP_GE:
      return x >= b ? 1.0F : 0.0F;
    case CUDNN_POINTWISE_CMP_GT:
      return x > b ? 1.0F : 0.0F;
    case CUDNN_POINTWISE_BINARY_SELECT:
      return condition != 0.0F ? x : b;
    default:
      return std::numeric_limits<float>::quiet_NaN();
  }
}

/// One operation on its tensors' values.
class Computation {
 public:
  Computation(const FakeOperation& operation, std::map<const FakeTensor*, Values>& values)
      : operation_(operation), values_(values) {}

  void run() {
    if (operation_.kind == FakeOperation::Kind::matmul) return product();
    if (operation_.kind == FakeOperation::Kind::reduction) return reduction();
    Values& y = of(operation_.y);
    for_places(operation_.y->extents, [&](const Four& at) {
      const auto value = [&](const FakeTensor* tensor) {
        return tensor == nullptr ? 0.0F : of(tensor).get(at);
      };
      y.set(at, function(operation_, at, value(operation_.x), value(operation_.b),
                         value(operation_.condition)));
    });
  }

 private:
  Values& of(const FakeTensor* tensor) { return values_.at(tensor); }

  void product() {
    const Values& a = of(operation_.x);
    const Values& b = of(operation_.b);
    const std::int64_t group = operation_.x->extents[1] / operation_.b->extents[1];
    for_places(operation_.y->extents, [&](const Four& at) {
      double sum = 0.0;
      for (std::int64_t k = 0; k < operation_.x->extents[3]; ++k) {
        sum += static_cast<double>(a.get({at[0], at[1], at[2], k})) *
               b.get({at[0], at[1] / group, k, at[3]});
      }
      of(operation_.y).set(at, static_cast<float>(sum));
    });
  }

  void reduction() {
    const bool greatest = operation_.reduction == CUDNN_REDUCE_TENSOR_MAX;
    const Values& x = of(operation_.x);
    for_places(operation_.y->extents, [&](const Four& at) {
      float result = greatest ? -std::numeric_limits<float>::infinity() : 0.0F;
      for (std::int64_t i = 0; i < operation_.x->extents[3]; ++i) {
        const float value = x.get({at[0], at[1], at[2], i});
        result = greatest ? std::max(result, value) : result + value;
      }
      of(operation_.y).set(at, result);
    });
  }

  const FakeOperation& operation_;
  std::map<const FakeTensor*, Values>& values_;
};

bool stands_for(const Four& part, const Four& whole) {
  for (std::size_t i = 0; i < 4; ++i) {
    if (part[i] != 1 && part[i] != whole[i]) return false;
  }
  return true;
}

}  // namespace

std::string FakeOperation::complaint() const {
  if (x == nullptr || y == nullptr) return "an operation without its tensors";
  const Four& in = x->extents;
  const Four& out = y->extents;
  if (kind == Kind::matmul) {
    if (b == nullptr) return "a product of one matrix";
    const Four& other = b->extents;
    const bool fits = in[0] == out[0] && in[1] == out[1] && in[2] == out[2] && other[0] == in[0] &&
                      in[1] % other[1] == 0 && other[2] == in[3] && other[3] == out[3];
    return fits ? "" : "a product of matrices that do not fit";
  }
  if (kind == Kind::reduction) {
    return out == Four{in[0], in[1], in[2], 1} ? "" : "a reduction of other than columns";
  }
  const std::set one = {CUDNN_POINTWISE_EXP, CUDNN_POINTWISE_LOG, CUDNN_POINTWISE_GEN_INDEX};
  if (one.contains(mode) != (b == nullptr)) return "a function of another count of arguments";
  if ((mode == CUDNN_POINTWISE_BINARY_SELECT) != (condition != nullptr))
    return "a strange condition";
  if ((mode == CUDNN_POINTWISE_GEN_INDEX) != (axis >= 0)) return "a strange axis";
  for (const FakeTensor* tensor : inputs()) {
    if (!stands_for(tensor->extents, out)) return "a function of tensors that do not fit";
  }
  return "";
}

std::string FakeGraph::complaint() const {
  if (operations.empty()) return "an empty graph";
  std::map<std::int64_t, const FakeTensor*> by_id;
  std::set<const FakeTensor*> written;
  std::set<const FakeTensor*> read;
  for (const FakeOperation& operation : operations) {
    for (const FakeTensor* tensor : operation.inputs()) {
      if (tensor->is_virtual && !written.contains(tensor)) return "nothing has written a tensor";
      read.insert(tensor);
    }
    if (operation.y->by_value || !written.insert(operation.y).second) return "written where not to";
  }
  for (const std::set<const FakeTensor*>& tensors : {written, read}) {
    for (const FakeTensor* tensor : tensors) {
      const auto [found, is_new] = by_id.try_emplace(tensor->id, tensor);
      if (!is_new && found->second != tensor) return "two tensors of one id";
    }
  }
  for (const FakeTensor* tensor : written) {
    if (tensor->is_virtual && !read.contains(tensor)) return "nobody reads a tensor";
    if (!tensor->is_virtual && read.contains(tensor)) return "a result is read";
  }
  return "";
}

bool FakeGraph::is_attention() const {
  std::vector<std::pair<FakeOperation::Kind, int>> found;
  for (const FakeOperation& o : operations) {
    const bool pointwise = o.kind == FakeOperation::Kind::pointwise;
    const bool reduction = o.kind == FakeOperation::Kind::reduction;
    const int which = pointwise ? static_cast<int>(o.mode) : reduction ? o.reduction : 0;
    found.emplace_back(o.kind, which);
  }
  constexpr auto kMatmul = FakeOperation::Kind::matmul;
  constexpr auto kPointwise = FakeOperation::Kind::pointwise;
  constexpr auto kReduction = FakeOperation::Kind::reduction;
  const decltype(found) known = {{kMatmul, 0},
                                 {kPointwise, CUDNN_POINTWISE_MUL},
                                 {kPointwise, CUDNN_POINTWISE_GEN_INDEX},
                                 {kPointwise, CUDNN_POINTWISE_GEN_INDEX},
                                 {kPointwise, CUDNN_POINTWISE_CMP_GE},
                                 {kPointwise, CUDNN_POINTWISE_BINARY_SELECT},
                                 {kReduction, CUDNN_REDUCE_TENSOR_MAX},
                                 {kPointwise, CUDNN_POINTWISE_SUB},
                                 {kPointwise, CUDNN_POINTWISE_EXP},
                                 {kReduction, CUDNN_REDUCE_TENSOR_ADD},
                                 {kPointwise, CUDNN_POINTWISE_LOG},
                                 {kPointwise, CUDNN_POINTWISE_ADD},
                                 {kPointwise, CUDNN_POINTWISE_DIV},
                                 {kMatmul, 0}};
  if (found != known) return false;
  // What the second product multiplies is in the type of its other operand.
  return operations[2].axis == 2 && operations[3].axis == 3 &&
         operations[2].y->type == CUDNN_DATA_INT32 && operations[4].y->type == CUDNN_DATA_BOOLEAN &&
         operations[11].y->type == CUDNN_DATA_FLOAT && !operations[11].y->is_virtual &&
         operations[13].x->type == operations[13].b->type;
}

std::map<std::int64_t, const FakeTensor*> FakeGraph::bound() const {
  std::map<std::int64_t, const FakeTensor*> found;
  for (const FakeOperation& operation : operations) {
    for (const FakeTensor* tensor : operation.inputs()) {
      if (!tensor->is_virtual) found[tensor->id] = tensor;
    }
    if (!operation.y->is_virtual) found[operation.y->id] = operation.y;
  }
  return found;
}

void FakeGraph::compute(const std::map<std::int64_t, void*>& places) const {
  std::map<const FakeTensor*, Values> values;
  const auto prepare = [&](const FakeTensor* tensor) {
    void* const place = tensor->is_virtual ? nullptr : places.at(tensor->id);
    values.try_emplace(tensor, *tensor, place);
  };
  for (const FakeOperation& operation : operations) {
    for (const FakeTensor* tensor : operation.inputs()) prepare(tensor);
    prepare(operation.y);
    Computation(operation, values).run();
  }
}

}  // namespace ballast::test
