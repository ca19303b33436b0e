#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

#include "src/model/cuda/attention/attention.h"

namespace ballast::test {

/// Causal attention with grouped queries in double. With every result comes its size: the sum of
/// the magnitudes of all terms, to which rounding errors are proportional.
struct AttentionReference {
  using Values = std::vector<double>;
  struct Result {
    Values value;
    Values size;
    explicit Result(std::size_t count) : value(count), size(count) {}
    void add(std::size_t at, double term) {
      value[at] += term;
      size[at] += std::abs(term);
    }
  };

  model::AttentionShape shape;  ///< positions in host memory
  Values sinks = {};            ///< one per head; empty: none

  struct Forward {
    Result out;
    Values log_sums;
  };
  [[nodiscard]] Forward forward(const Values& qkv) const {
    Forward result{Result(shape.tokens() * shape.width()), Values(shape.log_sums())};
    for_rows([&](const Row& row) {
      const Values scores = scores_of(row, qkv);
      const double log_sum = log_sum_of(row, scores);
      result.log_sums[row.log_sum] = log_sum;
      for (std::size_t j = 0; j < scores.size(); ++j) {
        const double p = std::exp(scores[j] - log_sum);
        for (std::size_t i = 0; i < shape.head_dim; ++i) {
          result.out.add(row.out + i, p * qkv[row.value + j * shape.row() + i]);
        }
      }
    });
    return result;
  }

  /// Gradient of qkv, given that of `out`; uses the given values of `out`.
  [[nodiscard]] Result backward(const Values& qkv, const Values& out, const Values& dout) const {
    Result result(shape.tokens() * shape.row());
    for_rows([&](const Row& row) {
      const Values scores = scores_of(row, qkv);
      const double log_sum = log_sum_of(row, scores);
      double delta = 0.0;
      for (std::size_t i = 0; i < shape.head_dim; ++i) {
        delta += dout[row.out + i] * out[row.out + i];
      }
      for (std::size_t j = 0; j < scores.size(); ++j) {
        const std::size_t key = row.key + j * shape.row();
        const std::size_t value = row.value + j * shape.row();
        const double p = std::exp(scores[j] - log_sum);
        double dp = 0.0;
        for (std::size_t i = 0; i < shape.head_dim; ++i) dp += dout[row.out + i] * qkv[value + i];
        const double ds = p * (dp - delta) * slope(scores[j]);
        for (std::size_t i = 0; i < shape.head_dim; ++i) {
          result.add(row.query + i, ds * qkv[key + i]);
          result.add(key + i, ds * qkv[row.query + i]);
          result.add(value + i, p * dout[row.out + i]);
        }
      }
    });
    return result;
  }

  /// Gradient of the sinks, using the given values of `out`.
  [[nodiscard]] Result of_sinks(const Values& qkv, const Values& out, const Values& dout) const {
    Result result(shape.heads);
    for_rows([&](const Row& row) {
      const double p = std::exp(sinks[row.head] - log_sum_of(row, scores_of(row, qkv)));
      for (std::size_t i = 0; i < shape.head_dim; ++i) {
        result.add(row.head, -p * dout[row.out + i] * out[row.out + i]);
      }
    });
    return result;
  }

 private:
  [[nodiscard]] double scale() const {
    return shape.scale != 0.0 ? shape.scale : 1.0 / std::sqrt(static_cast<double>(shape.head_dim));
  }
  /// Returns the derivative of a score with respect to the product of query and key. 0 for a hidden
  /// key.
  [[nodiscard]] double slope(double score) const {
    if (shape.cap == 0.0) return scale();
    if (std::isinf(score)) return 0.0;
    return scale() * (1.0 - score * score / (shape.cap * shape.cap));
  }
  /// One query: its sequence and position, offsets of the query, of the first key and value that it
  /// sees, and of its results.
  struct Row {
    std::size_t sequence;
    std::size_t head;
    std::size_t position;
    std::size_t query;
    std::size_t key;
    std::size_t value;
    std::size_t out;
    std::size_t log_sum;
  };
  template <class Body>
  void for_rows(const Body& body) const {
    const std::size_t size = shape.head_dim;
    for (std::size_t s = 0; s < shape.sequences; ++s) {
      for (std::size_t h = 0; h < shape.heads; ++h) {
        const std::size_t kv = h / (shape.heads / shape.kv_heads);
        for (std::size_t i = 0; i < shape.length; ++i) {
          const std::size_t token = s * shape.length + i;
          const std::size_t keys = s * shape.length * shape.row() + shape.width() + kv * size;
          body(Row{s, h, i, token * shape.row() + h * size, keys, keys + shape.kv_width(),
                   token * shape.width() + h * size, (s * shape.heads + h) * shape.length + i});
        }
      }
    }
  }
  [[nodiscard]] Values scores_of(const Row& row, const Values& qkv) const {
    Values scores(row.position + 1);
    for (std::size_t j = 0; j < scores.size(); ++j) {
      for (std::size_t i = 0; i < shape.head_dim; ++i) {
        scores[j] += qkv[row.query + i] * qkv[row.key + j * shape.row() + i];
      }
      scores[j] *= scale();
      if (shape.cap > 0.0) scores[j] = shape.cap * std::tanh(scores[j] / shape.cap);
      if (j < shape.mask.of(row.sequence, shape.length).first_key(row.position)) {
        scores[j] = -std::numeric_limits<double>::infinity();
      }
    }
    return scores;
  }
  [[nodiscard]] double log_sum_of(const Row& row, const Values& scores) const {
    double greatest = *std::max_element(scores.begin(), scores.end());
    if (!sinks.empty()) greatest = std::max(greatest, sinks[row.head]);
    double sum = sinks.empty() ? 0.0 : std::exp(sinks[row.head] - greatest);
    for (const double score : scores) sum += std::exp(score - greatest);
    return greatest + std::log(sum);
  }
};

}  // namespace ballast::test
