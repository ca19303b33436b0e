#pragma once

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include "ballast/model/compute.h"

#include "src/model/compute/experts.h"

namespace ballast::model {

/// Rows that are exchanged between the ranks in one round.
struct ExchangeRound {
  std::vector<ExpertChoices> leaving;  ///< see SharedChoices
  std::vector<std::size_t> arriving;
  std::size_t arrived = 0;  ///< their sum

  /// Returns all rounds. Each has at most `step` choices of one rank for one expert.
  static std::vector<ExchangeRound> all(const SharedChoices& choices, std::size_t step) {
    std::vector<ExchangeRound> rounds;
    for (std::size_t done = 0; done < choices.most; done += step) {
      const auto part = [&](std::size_t count) {
        return std::min(step, count - std::min(done, count));
      };
      ExchangeRound& round = rounds.emplace_back();
      for (const ExpertChoices& own : choices.leaving) {
        round.leaving.push_back({own.first + done, part(own.count)});
      }
      for (const std::size_t count : choices.arriving) {
        round.arriving.push_back(part(count));
        round.arrived += round.arriving.back();
      }
    }
    return rounds;
  }
};

/// Forward and backward pass of a block with one expert per rank (GShard, arXiv 2006.16668, section
/// 3.2). Rows are dispatched to the rank of their expert, computed there with those of other ranks,
/// and the results are combined on their own ranks. This happens in rounds, so the memory does not
/// depend on the routing. `Run`: run(work) enqueues work on `stream`.
template <class Ops, class Run>
class ExpertExchange {
 public:
  using T = typename Ops::Value;

  ExpertExchange(Experts<Ops>& experts, std::size_t width, device::Stream& stream,
                 RowExchange& exchange, Run run)
      : experts_(experts), width_(width), stream_(stream), exchange_(exchange), run_(run) {}

  /// Like Experts::forward().
  void forward(std::size_t block, const BlockWeights<T>& weights, std::byte* rows,
               const SharedChoices& choices, float* sums) {
    const auto at = experts_.travelling();
    for (ExchangeRound& round : ExchangeRound::all(choices, experts_.rows_per_exchange())) {
      send_inputs(round, rows);
      run_([&experts = experts_, block, weights, count = round.arrived] {
        experts.compute_arrived(block, weights, count);
      });
      send_back(round, at.results, at.returned, width_ * sizeof(float));
      run_([&experts = experts_, rows, sums, own = std::move(round.leaving)] {
        experts.add_returned(rows, own, sums);
      });
    }
  }

  /// Like Experts::backward().
  void backward(std::size_t block, const BlockWeights<T>& weights, std::byte* rows,
                const SharedChoices& choices, const T* dy, float* sums) {
    const auto at = experts_.travelling();
    for (ExchangeRound& round : ExchangeRound::all(choices, experts_.rows_per_exchange())) {
      send_inputs(round, rows);
      run_([&experts = experts_, rows, dy, own = round.leaving] {
        experts.collect_gradients(rows, own, dy);
      });
      send(round, at.leaving, at.gradients, width_ * sizeof(T));
      run_([&experts = experts_, block, weights, count = round.arrived] {
        experts.differentiate_arrived(block, weights, count);
      });
      send_back(round, at.results, at.returned, width_ * sizeof(float));
      send_back(round, at.dots, at.returned_dots, sizeof(float));
      run_([&experts = experts_, rows, sums, own = std::move(round.leaving)] {
        experts.add_returned_gradients(rows, own, sums);
      });
    }
  }

 private:
  static std::vector<Bytes> leaving(const ExchangeRound& round, Bytes row) {
    std::vector<Bytes> parts;
    for (const ExpertChoices& own : round.leaving) parts.push_back(own.count * row);
    return parts;
  }
  static std::vector<Bytes> arriving(const ExchangeRound& round, Bytes row) {
    std::vector<Bytes> parts;
    for (const std::size_t count : round.arriving) parts.push_back(count * row);
    return parts;
  }
  void send_inputs(const ExchangeRound& round, std::byte* rows) {
    const auto at = experts_.travelling();
    run_([&experts = experts_, rows, own = round.leaving] { experts.collect_inputs(rows, own); });
    send(round, at.leaving, at.inputs, width_ * sizeof(T));
  }
  /// Sends rows to the experts' ranks. `row`: size of a row in bytes.
  void send(const ExchangeRound& round, ConstDeviceBytes from, DeviceBytes to, Bytes row) {
    exchange_.exchange(stream_, from, leaving(round, row), to, arriving(round, row));
  }
  void send_back(const ExchangeRound& round, ConstDeviceBytes from, DeviceBytes to, Bytes row) {
    exchange_.exchange(stream_, from, arriving(round, row), to, leaving(round, row));
  }

  Experts<Ops>& experts_;
  std::size_t width_;
  device::Stream& stream_;
  RowExchange& exchange_;
  Run run_;
};

}  // namespace ballast::model
