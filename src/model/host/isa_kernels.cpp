// Compiled once per instruction set; BALLAST_KERNEL_ISA is its name.
#include "src/model/host/elementwise_kernels.h"
#include "src/model/host/mixer_kernels.h"
#include "src/model/host/reduction_kernels.h"
#include "src/model/host/weight_kernels.h"

namespace ballast::model::host::BALLAST_KERNEL_ISA {
namespace {

template <class T>
MixerKernels<T> mixers() {
  return {.convolve = convolve<T>,
          .convolve_backward = convolve_backward<T>,
          .gated_convolve = gated_convolve<T>,
          .gated_convolve_backward = gated_convolve_backward<T>,
          .gated_norm = gated_norm<T>,
          .gated_norm_backward = gated_norm_backward<T>,
          .sigmoid_gate = sigmoid_gate<T>,
          .sigmoid_gate_backward = sigmoid_gate_backward<T>,
          .unit_row = unit_row<T>,
          .unit_row_backward = unit_row_backward<T>,
          .chunk_decays = chunk_decays,
          .chunk_scores = chunk_scores,
          .chunk_solve = chunk_solve,
          .chunk_scores_backward = chunk_scores_backward};
}

template <class T>
TypeKernels<T> kernels() {
  TypeKernels<T> all;
  RowKernels<T>& k = all.rows;
  k.norm = norm<T>;
  k.norm_backward = norm_backward<T>;
  for (Size f = 0; f < k.activations.size(); ++f) {
    formulas::with_activation(static_cast<Activation>(f), [&](auto is) {
      k.activations[f] = {activate<is(), T>, activate_backward<is(), T>, glu<is(), T>,
                          glu_backward<is(), T>};
    });
  }
  k.limited_swiglu = limited_swiglu<T>;
  k.limited_swiglu_backward = limited_swiglu_backward<T>;
  k.column_sum = column_sum<T>;
  k.rope = rope<T>;
  k.interleaved_rope = interleaved_rope<T>;
  k.add = add<T>;
  k.accumulate = accumulate<T>;
  k.scale = scale<T>;
  k.accumulate_scaled = accumulate_scaled<T>;
  k.widen = widen_row<T>;
  k.convert = convert<T>;
  k.row_dot = row_dot<T>;
  k.attention_softmax = attention_softmax<T>;
  k.soft_cap = soft_cap<Acc<T>>;
  k.attention_softmax_backward = attention_softmax_backward<T>;
  k.sum_logits = sum_logits<Acc<T>>;
  k.logit_gradients = logit_gradients<T>;
  all.gradients = {pack<T>, measure<T>};
  all.codes = {encode<T>, decode<T>};
  all.mixers = mixers<T>();
  return all;
}

}  // namespace

/// Fills in the kernels. Sets only constants, so it is safe on a CPU without this instruction set.
void fill(KernelTable& table) {
  table.normals = normals;
  table.f32 = kernels<float>();
  table.bf16 = kernels<Bf16>();
  table.f16 = kernels<F16>();
}

}  // namespace ballast::model::host::BALLAST_KERNEL_ISA
