#pragma once

#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "aio/dispatcher.h"

namespace ballast::aio {

/// The queue of every backend: a table that callers and owner thread share, a dispatcher on the
/// owner thread, a transport below it.
class BlockQueue final : public Queue {
 public:
  using MakeTransport = std::function<std::unique_ptr<Transport>(unsigned depth)>;

  /// Starts the owner thread, on which `make_transport` runs. Throws what it throws, and
  /// Error(config) when an option is out of range.
  BlockQueue(std::string backend, const QueueOptions& options, MakeTransport make_transport);
  ~BlockQueue() override;

  Ticket submit(Request request) override;
  std::vector<Ticket> submit(std::span<Request> requests) override;
  Completion wait(Ticket ticket) override;
  void cancel() override;
  [[nodiscard]] std::string_view backend() const override { return backend_; }
  [[nodiscard]] QueueCounters counters() const override;

 private:
  /// What the owner thread works with. It outlives the queue when the device never answers.
  struct Work {
    explicit Work(const QueueOptions& options) : dispatcher(table, options) {}
    RequestTable table;
    Dispatcher dispatcher;
    std::unique_ptr<Transport> transport;
  };
  static void serve(std::shared_ptr<Work> work);

  const std::string backend_;
  std::shared_ptr<Work> work_;
  std::thread owner_;
};

}  // namespace ballast::aio
