#pragma once

#include "ballast/model/packed_values.h"

// All headers of the kernels that tests with recorded calls need.
#include "src/model/compute/formulas.h"
#include "src/model/compute/kernel_arguments.h"
#include "src/model/compute/layer_arguments.h"
#include "src/model/compute/routing.h"
#include "tests/support/call_log.h"

namespace ballast::model {

// How the arguments of operations are written to a list of calls (test::CallLog). All members are
// written, so a member that a call sets differently changes its line.

template <class T>
void show(test::CallLog& log, const Norm<T>& n) {
  log.add_group(n.weight, n.bias, n.weight_gradient, n.bias_gradient, n.offset, n.epsilon);
}
template <class T>
void show(test::CallLog& log, const Linear<T>& l) {
  log.add_group(l.weight, l.bias, l.weight_gradient, l.bias_gradient, l.in, l.out, l.flipped,
                l.overwrites_gradient);
}
inline void show(test::CallLog& log, const Groups& g) {
  log.add_group(g.rows, g.count, g.width);
}
inline void show(test::CallLog& log, const GroupSteps& s) {
  log.add_group(s.row, s.group);
}
template <class T>
void show(test::CallLog& log, const GateUp<T>& g) {
  log.add_group(g.gate, g.up, g.step, g.rows, g.width);
}
inline void show(test::CallLog& log, const Gating& g) {
  log.add_group(g.activation, g.limit, g.slope);
}
inline void show(test::CallLog& log, const Angles& a) {
  log.add_group(a.cosine, a.sine, a.half, a.interleaved, a.by_row);
}
inline void show(test::CallLog& log, const Rotary& r) {
  log.add_group(r.frequencies.size(), r.factor, r.trained_length, r.long_frequencies.size(),
                r.growth, r.slope, r.period, r.interleaved);
  for (const double frequency : r.frequencies) log.add(frequency);
}
inline void show(test::CallLog& log, const AttentionMask& m) {
  log.add_group(m.window, m.positions);
}
template <class T>
void show(test::CallLog& log, const AttentionSinks<T>& s) {
  log.add_group(s.logits, s.gradient);
}
inline void show(test::CallLog& log, const ConvolutionShape& c) {
  log.add_group(c.sequences, c.length, c.channels, c.taps, c.x_step, c.biased);
}
template <class T>
void show(test::CallLog& log, const Convolution<T>& c) {
  log.add_group(c.weight, c.weight_gradient, c.positions);
}
template <class T>
void show(test::CallLog& log, const DeltaInputs<T>& d) {
  log.add_group(d.channels, d.betas, d.betas_step, d.decay, d.shift, d.positions);
}
template <class T>
void show(test::CallLog& log, const DeltaGradients<T>& d) {
  log.add_group(d.channels, d.betas, d.step, d.decay, d.shift);
}
template <class T>
void show(test::CallLog& log, const TokenRows<T>& r) {
  log.add_group(r.rows, r.size, r.width);
}
inline void show(test::CallLog& log, const TokenMix& m) {
  log.add_group(m.scale, m.factor);
}
inline void show(test::CallLog& log, const Extents& e) {
  log.add_group(e.m, e.n, e.k);
}
inline void show(test::CallLog& log, const Matrix& m) {
  log.add_group(m.data, m.type, m.row_step, m.column_step);
}
template <class T>
void show(test::CallLog& log, const AdaptedRows<T>& a) {
  log.add_group(a.map, a.b, a.magnitudes, a.cross, a.gram, a.rank, a.scale);
}
template <class T>
void show(test::CallLog& log, const ScaledColumns<T>& s) {
  log.add_group(s.scales, s.x, s.x_step, s.y, s.y_step, s.rows, s.width, s.bias, s.residual);
}
template <class T>
void show(test::CallLog& log, const ColumnProducts<T>& c) {
  log.add_group(c.x, c.x_step, c.y, c.y_step, c.factors, c.rows, c.width);
}
inline void show(test::CallLog& log, const DropoutMask& m) {
  log.add_group(m.key, m.stream, m.first, m.threshold, m.factor);
}
inline void show(test::CallLog& log, const Regrouping& r) {
  log.add_group(r.slices, r.sequences, r.length, r.first, r.others, r.from, r.to);
}
inline void show(test::CallLog& log, const Ids& i) {
  log.add_group(i.tokens, i.positions, i.sum_rows);
}
template <class T>
void show(test::CallLog& log, const Embedding<T>& e) {
  log.add_group(e.tokens, e.positions, e.scale, e.first, e.size, e.tile, e.begins);
}
inline void show(test::CallLog& log, const LogitTile& t) {
  log.add_group(t.logits, t.rows, t.stride, t.first, t.width, t.cap);
}
inline void show(test::CallLog& log, const RowSumsOfTiles& s) {
  log.add_group(s.sums, s.places, s.tiles, s.rows, s.step);
}
inline void show(test::CallLog& log, const PairRows& p) {
  log.add_group(p.losses, p.targets, p.length, p.pairs, p.reference, p.weights);
}
inline void show(test::CallLog& log, const Preference& p) {
  log.add_group(p.beta, p.label_smoothing);
}
inline void show(test::CallLog& log, const RouterShape& s) {
  log.add_group(s.rows, s.experts, s.per_token, s.renormalises, s.sigmoid, s.groups, s.kept_groups,
                s.factor);
}
template <class T>
void show(test::CallLog& log, const RouterBiases<T>& b) {
  log.add_group(b.logits, b.correction, b.moved);
}
inline void show(test::CallLog& log, const Routing& r) {
  log.add_group(r.probabilities, r.log_sums, r.weights, r.weight_gradients, r.chosen, r.places);
}
inline void show(test::CallLog& log, const RouterTotals& t) {
  log.add_group(t.probabilities, t.choices, t.squares);
}
inline void show(test::CallLog& log, const RouterLossScales& s) {
  log.add_group(s.balance, s.z);
}
inline void show(test::CallLog& log, const ExpertRows& r) {
  log.add_group(r.places, r.count, r.per_token);
}
inline void show(test::CallLog& log, const UnpackedGradient& g) {
  log.add_group(g.sum_rows, g.sum_row_of, g.rows, g.width, g.table, g.rest, g.tied, g.tied_size);
}
inline void show(test::CallLog& log, const QuantizedMatrix& m) {
  log.add_group(m.quantization.format, m.arrays.scales_count, m.at);
}

}  // namespace ballast::model
