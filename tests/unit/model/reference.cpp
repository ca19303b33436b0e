#include "tests/unit/model/reference.h"

#include <algorithm>
#include <cmath>

namespace ballast::test {
namespace {

using Values = Reference::Values;

/// x [rows, in] times W; W [in, out], or [out, in] when `flipped`.
Values product(const Values& x, const double* w, std::size_t in, std::size_t out, bool flipped,
               const double* bias = nullptr) {
  const std::size_t rows = x.size() / in;
  Values y(rows * out);
  for (std::size_t r = 0; r < rows; ++r) {
    for (std::size_t o = 0; o < out; ++o) y[r * out + o] = bias == nullptr ? 0.0 : bias[o];
    for (std::size_t i = 0; i < in; ++i) {
      for (std::size_t o = 0; o < out; ++o) {
        y[r * out + o] += x[r * in + i] * (flipped ? w[o * in + i] : w[i * out + o]);
      }
    }
  }
  return y;
}

Values sum(Values a, const Values& b) {
  for (std::size_t i = 0; i < a.size(); ++i) a[i] += b[i];
  return a;
}

/// Columns [first, first + width) of rows of `row` values.
Values columns(const Values& x, std::size_t row, std::size_t first, std::size_t width) {
  Values out;
  for (std::size_t r = 0; r < x.size() / row; ++r) {
    const auto begin = x.begin() + static_cast<std::ptrdiff_t>(r * row + first);
    out.insert(out.end(), begin, begin + static_cast<std::ptrdiff_t>(width));
  }
  return out;
}

}  // namespace

Values Reference::norm(const Values& x, const double* weight, const double* bias) const {
  const std::size_t width = config.hidden_size;
  Values y(x.size());
  for (std::size_t r = 0; r < x.size() / width; ++r) {
    const double* const row = &x[r * width];
    double mean = 0.0;
    if (bias != nullptr) {
      for (std::size_t i = 0; i < width; ++i) mean += row[i] / static_cast<double>(width);
    }
    double square = 0.0;
    for (std::size_t i = 0; i < width; ++i) {
      square += (row[i] - mean) * (row[i] - mean) / static_cast<double>(width);
    }
    const double deviation = std::sqrt(square + config.norm_epsilon);
    for (std::size_t i = 0; i < width; ++i) {
      y[r * width + i] =
          (row[i] - mean) / deviation * weight[i] + (bias == nullptr ? 0.0 : bias[i]);
    }
  }
  return y;
}

Values Reference::attention(const Values& q, const Values& k, const Values& v) const {
  const std::size_t size = config.head_dim;
  const std::size_t heads = config.num_heads;
  const std::size_t kv_heads = config.num_kv_heads;
  Values out(q.size());
  Values p(length);
  for (std::size_t row = 0; row < tokens(); ++row) {
    const std::size_t document = row - position(row);
    const std::size_t start = window == 0 || row < document + window ? document : row + 1 - window;
    for (std::size_t h = 0; h < heads; ++h) {
      const std::size_t kv = h / (heads / kv_heads);
      double total = 0.0;
      for (std::size_t j = start; j <= row; ++j) {
        double score = 0.0;
        for (std::size_t i = 0; i < size; ++i) {
          score += q[(row * heads + h) * size + i] * k[(j * kv_heads + kv) * size + i];
        }
        p[j - start] = std::exp(score / std::sqrt(static_cast<double>(size)));
        total += p[j - start];
      }
      for (std::size_t j = start; j <= row; ++j) {
        for (std::size_t i = 0; i < size; ++i) {
          out[(row * heads + h) * size + i] +=
              p[j - start] / total * v[(j * kv_heads + kv) * size + i];
        }
      }
    }
  }
  return out;
}

bool Reference::is_long(double document) const {
  const text::Json* const trained =
      config.detail("rope_scaling").find("original_max_position_embeddings");
  return trained != nullptr && document > trained->number();
}

Values Reference::frequencies(std::size_t row) const {
  const auto size = static_cast<double>(config.head_dim);
  const text::Json& scaling = config.detail("rope_scaling");
  double theta = config.number("rope_theta");
  std::size_t last = row;
  while ((last + 1) % length != 0 && position(last + 1) > 0) ++last;
  const auto document = static_cast<double>(position(last) + 1);
  const text::Json* const divisors =
      scaling.find(is_long(document) ? "long_factor" : "short_factor");
  if (divisors == nullptr && is_long(document)) {  // dynamic
    const double factor = scaling.find("factor")->number();
    const double trained = scaling.find("original_max_position_embeddings")->number();
    theta *= std::pow(factor * document / trained - (factor - 1.0), size / (size - 2.0));
  }
  Values found;
  for (std::size_t i = 0; i < config.head_dim / 2; ++i) {
    found.push_back(std::pow(theta, -2.0 * static_cast<double>(i) / size));
    if (divisors != nullptr) found[i] /= divisors->elements()[i].number();
  }
  return found;
}

void Reference::rotate(Values& x, std::size_t heads) const {
  const std::size_t size = config.head_dim;
  const std::size_t half = size / 2;
  for (std::size_t row = 0; row < tokens(); ++row) {
    const Values of_pairs = frequencies(row);
    for (std::size_t h = 0; h < heads; ++h) {
      double* const head = &x[(row * heads + h) * size];
      for (std::size_t i = 0; i < half; ++i) {
        const double angle = static_cast<double>(position(row)) * of_pairs[i];
        const double a = head[i];
        const double b = head[i + half];
        head[i] = a * std::cos(angle) - b * std::sin(angle);
        head[i + half] = b * std::cos(angle) + a * std::sin(angle);
      }
    }
  }
}

Values Reference::embedding(const model::BlockSpec& block, const Values& weights,
                            const std::vector<std::int32_t>& tokens) const {
  const std::size_t width = config.hidden_size;
  Values out;
  for (std::size_t row = 0; row < tokens.size(); ++row) {
    for (std::size_t i = 0; i < width; ++i) {
      double value = weights[static_cast<std::size_t>(tokens[row]) * width + i];
      if (block.tensors.size() > 1) {
        value += weights[block.tensors[1].offset + position(row) * width + i];
      }
      out.push_back(value);
    }
  }
  return out;
}

Values Reference::gpt2_layer(const model::BlockSpec& block, const Values& weights,
                             const Values& in) const {
  const auto w = [&](const char* name) { return &weights[block.tensor(name).offset]; };
  const std::size_t h = config.hidden_size;
  const std::size_t a = config.num_heads * config.head_dim;
  const std::size_t wide = config.intermediate_size;
  const Values normed = norm(in, w("ln_1.weight"), w("ln_1.bias"));
  const Values qkv =
      product(normed, w("attn.c_attn.weight"), h, 3 * a, false, w("attn.c_attn.bias"));
  const Values mixed = attention(columns(qkv, 3 * a, 0, a), columns(qkv, 3 * a, a, a),
                                 columns(qkv, 3 * a, 2 * a, a));
  const Values middle =
      sum(product(mixed, w("attn.c_proj.weight"), a, h, false, w("attn.c_proj.bias")), in);
  Values hidden = product(norm(middle, w("ln_2.weight"), w("ln_2.bias")), w("mlp.c_fc.weight"), h,
                          wide, false, w("mlp.c_fc.bias"));
  for (double& x : hidden) {
    const double u = std::sqrt(2.0 / 3.14159265358979323846) * (x + 0.044715 * x * x * x);
    x = 0.5 * x * (1.0 + std::tanh(u));
  }
  return sum(product(hidden, w("mlp.c_proj.weight"), wide, h, false, w("mlp.c_proj.bias")), middle);
}

Values Reference::llama_layer(const model::BlockSpec& block, const Values& weights,
                              const Values& in) const {
  const auto w = [&](const char* name) { return &weights[block.tensor(name).offset]; };
  const std::size_t h = config.hidden_size;
  const std::size_t a = config.num_heads * config.head_dim;
  const std::size_t kv = config.num_kv_heads * config.head_dim;
  const std::size_t wide = config.intermediate_size;
  const Values normed = norm(in, w("input_layernorm.weight"), nullptr);
  Values q = product(normed, w("self_attn.q_proj.weight"), h, a, true);
  Values k = product(normed, w("self_attn.k_proj.weight"), h, kv, true);
  const Values v = product(normed, w("self_attn.v_proj.weight"), h, kv, true);
  rotate(q, config.num_heads);
  rotate(k, config.num_kv_heads);
  const Values middle =
      sum(product(attention(q, k, v), w("self_attn.o_proj.weight"), a, h, true), in);
  const Values normed2 = norm(middle, w("post_attention_layernorm.weight"), nullptr);
  Values gate = product(normed2, w("mlp.gate_proj.weight"), h, wide, true);
  const Values up = product(normed2, w("mlp.up_proj.weight"), h, wide, true);
  for (std::size_t i = 0; i < gate.size(); ++i) gate[i] *= up[i] / (1.0 + std::exp(-gate[i]));
  return sum(product(gate, w("mlp.down_proj.weight"), wide, h, true), middle);
}

Values Reference::layer(const model::BlockSpec& block, const Values& weights,
                        const Values& in) const {
  return config.family == "gpt2" ? gpt2_layer(block, weights, in) : llama_layer(block, weights, in);
}

double Reference::head(const Values& weights, const double* output, const Values& in,
                       const std::vector<std::int32_t>& targets) const {
  const std::size_t width = config.hidden_size;
  const std::size_t vocabulary = config.vocab_size;
  const bool gpt2 = config.family == "gpt2";
  const Values normed = norm(in, weights.data(), gpt2 ? &weights[round_up(width, 32)] : nullptr);
  double loss = 0.0;
  Values logits(vocabulary);
  for (std::size_t row = 0; row < targets.size(); ++row) {
    if (targets[row] < 0) continue;
    double total = 0.0;
    for (std::size_t t = 0; t < vocabulary; ++t) {
      double logit = 0.0;
      for (std::size_t i = 0; i < width; ++i) {
        logit += normed[row * width + i] * output[t * width + i];
      }
      logits[t] = logit;
      total += std::exp(logit);
    }
    loss += std::log(total) - logits[static_cast<std::size_t>(targets[row])];
  }
  return loss;
}

}  // namespace ballast::test
