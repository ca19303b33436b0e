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
  std::vector<ExpertChoices> sent;  ///< see SharedChoices
  std::vector<std::size_t> received;
  std::size_t received_rows = 0;  ///< their sum

  /// Returns all rounds. Each has at most `step` choices of one rank for one expert.
  static std::vector<ExchangeRound> all(const SharedChoices& choices, std::size_t step) {
    std::vector<ExchangeRound> rounds;
    for (std::size_t done = 0; done < choices.most; done += step) {
      const auto part = [&](std::size_t count) {
        return std::min(step, count - std::min(done, count));
      };
      ExchangeRound& round = rounds.emplace_back();
      for (const ExpertChoices& own : choices.sent) {
        round.sent.push_back({own.first + done, part(own.count)});
      }
      for (const std::size_t count : choices.received) {
        round.received.push_back(part(count));
        round.received_rows += round.received.back();
      }
    }
    return rounds;
  }
};

/// Forward and backward pass of a block with one expert per rank (GShard, arXiv 2006.16668, section
/// 3.2). Rows are dispatched to the rank of their expert, computed there with those of other ranks,
/// and the results are combined on their own ranks. This happens in rounds, so the memory does not
/// depend on the routing. `Run`: run(work) enqueues work on `stream`.
template <class T, class Run>
class ExpertExchange {
 public:
  ExpertExchange(Experts<T>& experts, std::size_t width, device::Stream& stream, AllToAll& exchange,
                 Run run)
      : experts_(experts), width_(width), stream_(stream), exchange_(exchange), run_(run) {}

  /// Like Experts::forward().
  void forward(std::size_t block, const BlockWeights<T>& weights, std::byte* rows,
               const SharedChoices& choices, float* sums) {
    const auto at = experts_.exchange_buffers();
    for (ExchangeRound& round : ExchangeRound::all(choices, experts_.rows_per_exchange())) {
      send_inputs(round, rows);
      run_([&experts = experts_, block, weights, count = round.received_rows] {
        experts.compute_received(block, weights, count);
      });
      send_back(round, at.results, at.returned, width_ * sizeof(float));
      run_([&experts = experts_, rows, sums, own = std::move(round.sent)] {
        experts.add_returned(rows, own, sums);
      });
    }
  }

  /// Like Experts::backward().
  void backward(std::size_t block, const BlockWeights<T>& weights, std::byte* rows,
                const SharedChoices& choices, const T* dy, float* sums) {
    const auto at = experts_.exchange_buffers();
    for (ExchangeRound& round : ExchangeRound::all(choices, experts_.rows_per_exchange())) {
      send_inputs(round, rows);
      run_([&experts = experts_, rows, dy, own = round.sent] {
        experts.collect_gradients(rows, own, dy);
      });
      send(round, at.sent, at.gradients, width_ * sizeof(T));
      run_([&experts = experts_, block, weights, count = round.received_rows] {
        experts.differentiate_received(block, weights, count);
      });
      send_back(round, at.results, at.returned, width_ * sizeof(float));
      send_back(round, at.dots, at.returned_dots, sizeof(float));
      run_([&experts = experts_, rows, sums, own = std::move(round.sent)] {
        experts.add_returned_gradients(rows, own, sums);
      });
    }
  }

 private:
  static std::vector<Bytes> sent(const ExchangeRound& round, Bytes row) {
    std::vector<Bytes> parts;
    for (const ExpertChoices& own : round.sent) parts.push_back(own.count * row);
    return parts;
  }
  static std::vector<Bytes> received(const ExchangeRound& round, Bytes row) {
    std::vector<Bytes> parts;
    for (const std::size_t count : round.received) parts.push_back(count * row);
    return parts;
  }
  void send_inputs(const ExchangeRound& round, std::byte* rows) {
    const auto at = experts_.exchange_buffers();
    run_([&experts = experts_, rows, own = round.sent] { experts.collect_inputs(rows, own); });
    send(round, at.sent, at.inputs, width_ * sizeof(T));
  }
  /// Sends rows to the experts' ranks. `row`: size of a row in bytes.
  void send(const ExchangeRound& round, ConstDeviceBytes from, DeviceBytes to, Bytes row) {
    exchange_.exchange(stream_, from, sent(round, row), to, received(round, row));
  }
  void send_back(const ExchangeRound& round, ConstDeviceBytes from, DeviceBytes to, Bytes row) {
    exchange_.exchange(stream_, from, received(round, row), to, sent(round, row));
  }

  Experts<T>& experts_;
  std::size_t width_;
  device::Stream& stream_;
  AllToAll& exchange_;
  Run run_;
};

}  // namespace ballast::model
