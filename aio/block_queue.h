#pragma once

#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "aio/dispatcher.h"

namespace ballast::aio {

/// The queue of every backend: a request table shared by callers and owner thread, and a dispatcher
/// and a transport on the owner thread.
class BlockQueue final : public Queue {
 public:
  using MakeTransport = std::function<std::unique_ptr<Transport>(unsigned depth)>;

  /// Starts the owner thread, on which `make_transport` runs. Throws what it throws, and
  /// Error(config) when an option is out of range.
  BlockQueue(std::string backend, const QueueOptions& options, MakeTransport make_transport);
  ~BlockQueue() override;

  Ticket submit(Request request) override { return work_->table.submit({&request, 1}).front(); }
  std::vector<Ticket> submit(std::span<Request> requests) override {
    return work_->table.submit(requests);
  }
  Completion wait(Ticket ticket) override { return work_->table.wait(ticket); }
  void cancel() override { work_->table.cancel(); }
  [[nodiscard]] std::string_view backend() const override { return backend_; }
  [[nodiscard]] QueueCounters counters() const override { return work_->table.counters(); }

 private:
  /// State of the owner thread. It outlives the queue when the device never answers.
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
