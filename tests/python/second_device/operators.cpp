// Runs every operator that has a kernel for the CPU with that kernel, on the memory of the emulated
// device, in the order of the current stream. Shapes of results are those that the same call with
// arguments of the same shapes had before. So the first such call waits for its end, later ones run
// late. Operators whose shapes depend on values, random ones, and others that are not `repeatable`
// always wait.

#include <map>
#include <mutex>
#include <optional>
#include <sstream>
#include <string>
#include <utility>

#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <torch/library.h>

#include "storage.h"

namespace second_device {
namespace {

using torch::jit::Stack;

struct Shape {
  bool defined = false;
  std::vector<std::int64_t> sizes, strides;
  at::ScalarType dtype = at::kFloat;
};

struct Shapes {
  std::mutex mutex;
  std::map<std::string, std::vector<Shape>> of_call;
};

Shapes& shapes() {
  static auto* one = new Shapes;
  return *one;
}

/// A call of an operator whose tensors are views of the device's memory for the CPU's kernel.
struct Call {
  const c10::OperatorHandle& op;
  std::vector<c10::IValue> given;
  Stack stack;
  std::vector<BlockSerial> used;
  std::ostringstream key;
  bool repeatable = true;
  bool on_device = false;  // any argument, or the argument `device`
  bool host_indices;
  std::vector<std::pair<at::Tensor, std::size_t>> resized;  // empty results, their arguments

  explicit Call(const c10::OperatorHandle& operation, Stack& arguments) : op(operation) {
    const auto& schema = op.schema();
    const std::string& name = schema.name();
    host_indices = name.find("index") != std::string::npos;
    const std::size_t count = schema.arguments().size();
    given.assign(arguments.end() - static_cast<std::ptrdiff_t>(count), arguments.end());
    torch::jit::drop(arguments, count);
    key << schema.name() << '.' << schema.overload_name();
    for (const at::Tag tag : op.getTags())
      if (tag == at::Tag::nondeterministic_seeded || tag == at::Tag::dynamic_output_shape ||
          tag == at::Tag::data_dependent_output)
        repeatable = false;
    for (std::size_t i = 0; i < count; ++i) stack.push_back(for_cpu(i));
  }

  at::Tensor for_cpu(const at::Tensor& tensor) {
    if (!tensor.defined()) {
      key << "|-";
      return tensor;
    }
    key << '|' << tensor.scalar_type() << tensor.sizes() << tensor.strides();
    if (tensor.is_privateuseone()) {
      on_device = true;
      return kernel_view(tensor, used);
    }
    const auto* impl = tensor.unsafeGetTensorImpl();
    TORCH_CHECK(tensor.is_cpu() && (tensor.dim() == 0 || host_indices),
                "Expected all tensors to be on the same device, but found at least two devices, ",
                "second:0 and ", tensor.device(), "! (in ", op.schema().operator_name(), ")");
    key << 'c' << impl->is_wrapped_number();
    at::Tensor copy = tensor.clone();
    if (impl->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
    return copy;
  }

  c10::IValue for_cpu(std::size_t index) {
    const c10::IValue& value = given[index];
    const c10::Argument& argument = op.schema().arguments()[index];
    if (value.isTensor()) {
      const at::Tensor& tensor = value.toTensor();
      if (argument.kwarg_only() && argument.is_out()) {
        repeatable = false;
        if (tensor.numel() == 0) {
          on_device = on_device || tensor.is_privateuseone();
          at::Tensor fresh = at::detail::empty_cpu({0}, tensor.scalar_type());
          resized.emplace_back(fresh, index);
          return fresh;
        }
      }
      return for_cpu(tensor);
    }
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& one : value.toTensorVector()) list.push_back(for_cpu(one));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& one : value.toOptionalTensorVector())
        list.push_back(one ? std::optional(for_cpu(*one)) : std::nullopt);
      return list;
    }
    if (value.isDevice()) {
      on_device = true;
      return c10::Device(c10::kCPU);
    }
    if (value.isGenerator() || value.isStorage())
      repeatable = false;
    else
      key << '|' << value;
    return value;
  }

  /// The argument that a result is, for operators that write their arguments.
  std::optional<c10::IValue> written(std::size_t result) const {
    const auto* alias = op.schema().returns()[result].alias_info();
    if (alias == nullptr) return std::nullopt;
    TORCH_CHECK(alias->isWrite(), "second device: ", op.schema().operator_name(),
                " makes a view, and has no implementation");
    for (std::size_t i = 0; i < given.size(); ++i) {
      const auto* other = op.schema().arguments()[i].alias_info();
      if (other != nullptr && *other == *alias) return given[i];
    }
    TORCH_CHECK(false, "second device: ", op.schema().operator_name(), " returns no argument");
  }
};

void call_cpu(const c10::OperatorHandle& op, Stack& stack, int threads) {
  if (at::get_num_threads() != threads) at::set_num_threads(threads);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
}

/// Runs the call late if the shapes of its results are known.
bool run_late(Call& call, Stack& stack) {
  const std::size_t count = call.op.schema().returns().size();
  std::vector<Shape> known;
  std::vector<std::optional<c10::IValue>> written;
  bool all_written = true;
  for (std::size_t i = 0; i < count; ++i) {
    written.push_back(call.written(i));
    all_written = all_written && written.back();
  }
  if (!call.repeatable) return false;
  if (!all_written) {
    std::lock_guard lock(shapes().mutex);
    const auto found = shapes().of_call.find(call.key.str());
    if (found == shapes().of_call.end()) return false;
    known = found->second;
  }
  std::vector<at::Tensor> targets(count);
  for (std::size_t i = 0; i < count; ++i) {
    if (written[i]) {
      stack.push_back(*written[i]);
    } else if (!known[i].defined) {
      stack.emplace_back(at::Tensor());
    } else {
      at::Tensor result = at::detail::empty_strided_generic(
          known[i].sizes, known[i].strides, c10::GetAllocator(c10::DeviceType::PrivateUse1),
          c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), known[i].dtype);
      targets[i] = kernel_view(result, call.used);
      stack.emplace_back(std::move(result));
    }
  }
  run(Kind::kernel, std::move(call.used),
      [op = call.op, arguments = std::move(call.stack), targets = std::move(targets),
       threads = at::get_num_threads()] {
        Stack local = arguments;
        call_cpu(op, local, threads);
        for (std::size_t i = 0; i < targets.size(); ++i)
          if (targets[i].defined()) targets[i].copy_(local[i].toTensor());
      });
  return true;
}

c10::IValue result_on_device(const c10::IValue& value, std::vector<Shape>& seen, bool& repeatable) {
  if (value.isTensorList()) {
    repeatable = false;
    c10::List<at::Tensor> list;
    for (const at::Tensor& one : value.toTensorVector())
      list.push_back(one.defined() ? to_device(one) : one);
    return list;
  }
  repeatable = repeatable && value.isTensor();
  if (!value.isTensor()) return value;
  const at::Tensor& tensor = value.toTensor();
  if (!tensor.defined()) {
    seen.emplace_back();
    return value;
  }
  seen.push_back({true, tensor.sizes().vec(), tensor.strides().vec(), tensor.scalar_type()});
  return to_device(tensor);
}

void run_now(Call& call, Stack& stack) {
  run(Kind::kernel, call.used,
      [&call, threads = at::get_num_threads()] { call_cpu(call.op, call.stack, threads); });
  synchronize(current_stream());
  for (auto& [fresh, index] : call.resized) {
    at::Tensor target = call.given[index].toTensor();
    target.resize_(fresh.sizes());
    target.copy_(fresh);
  }
  std::vector<Shape> seen;
  for (std::size_t i = 0; i < call.op.schema().returns().size(); ++i) {
    if (auto written = call.written(i)) {
      stack.push_back(*written);
      seen.emplace_back();
    } else if (call.on_device) {
      stack.push_back(result_on_device(call.stack[i], seen, call.repeatable));
    } else {
      stack.push_back(call.stack[i]);
    }
  }
  if (!call.repeatable) return;
  std::lock_guard lock(shapes().mutex);
  shapes().of_call[call.key.str()] = std::move(seen);
}

void on_cpu(const c10::OperatorHandle& op, Stack* stack) {
  Call call(op, *stack);
  if (!run_late(call, *stack)) run_now(call, *stack);
}

std::int64_t choose_attention(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                              const std::optional<at::Tensor>&, double, bool, std::optional<double>,
                              bool) {
  return static_cast<std::int64_t>(sdp::SDPBackend::math);
}

template <typename Function>
auto on_views(Function function) {
  std::vector<BlockSerial> used;
  const auto view = [&used](const at::Tensor& tensor) {
    return tensor.defined() ? kernel_view(tensor, used) : tensor;
  };
  auto task = function(view);
  decltype(task()) result;
  run(Kind::kernel, used, [&] { result = task(); });
  synchronize(current_stream());
  return result;
}

at::Tensor moved(const at::Tensor& tensor) {
  return tensor.defined() ? to_device(tensor) : tensor;
}

at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight,
                       const std::optional<at::Tensor>& bias, at::IntArrayRef stride,
                       at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
                       at::IntArrayRef output_padding, std::int64_t groups) {
  return moved(on_views([&](auto view) {
    return [=, x = view(input), w = view(weight), b = view(bias.value_or(at::Tensor()))] {
      return at::convolution(x, w, b, stride, padding, dilation, transposed, output_padding,
                             groups);
    };
  }));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight,
    at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
    at::IntArrayRef output_padding, std::int64_t groups, std::array<bool, 3> mask) {
  const std::vector<std::int64_t> bias{gradient.size(1)};
  auto [x, w, b] = on_views([&](auto view) {
    return [=, g = view(gradient), i = view(input), k = view(weight)] {
      return at::convolution_backward(g, i, k, bias, stride, padding, dilation, transposed,
                                      output_padding, groups, mask);
    };
  });
  return {moved(x), moved(w), moved(b)};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
}

}  // namespace

void register_operators() {
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1,
                                __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findSchema(name);
    if (!op || name.name.rfind("aten::", 0) != 0 ||
        !op->hasKernelForDispatchKey(c10::DispatchKey::CPU) ||
        op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1))
      continue;
    bool view = false;
    for (const c10::Argument& result : op->schema().returns())
      view = view || (result.alias_info() != nullptr && !result.alias_info()->isWrite());
    if (view) continue;
    std::string local = name.name.substr(6);
    if (!name.overload_name.empty()) local += "." + name.overload_name;
    library.impl(local.c_str(), torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
  }
}

}  // namespace second_device

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &second_device::choose_attention)
}  // namespace at::native
