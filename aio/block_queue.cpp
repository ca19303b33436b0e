#include "aio/block_queue.h"

#include <future>
#include <mutex>
#include <system_error>
#include <utility>

#include <pthread.h>

#include "ballast/core/error.h"

namespace ballast::aio {

BlockQueue::BlockQueue(std::string backend, const QueueOptions& options,
                       MakeTransport make_transport)
    : backend_(std::move(backend)), work_(std::make_shared<Work>(options)) {
  std::promise<void> ready;
  auto outcome = ready.get_future();
  try {
    owner_ = std::thread([work = work_, depth = options.depth, &ready, &make_transport]() mutable {
      pthread_setname_np(pthread_self(), "aio-owner");
      try {
        work->transport = make_transport(depth);
      } catch (...) {
        ready.set_exception(std::current_exception());
        return;
      }
      work->table.set_transport(work->transport.get());
      ready.set_value();
      serve(std::move(work));
    });
  } catch (const std::system_error& error) {
    throw Error(ErrorCategory::io, "cannot start the aio owner thread", error.code().value());
  }
  try {
    outcome.get();
  } catch (...) {
    owner_.join();
    throw;
  }
}

BlockQueue::~BlockQueue() {
  if (work_->table.stop()) {
    owner_.join();
  } else {
    // The kernel may keep the thread until the device answers.
    owner_.detach();
  }
}

void BlockQueue::serve(std::shared_ptr<Work> work) {
  RequestTable& table = work->table;
  if (work->dispatcher.run(*work->transport)) {
    table.set_transport(nullptr);
    work->transport.reset();
    return table.finish(RequestTable::Ending::complete);
  }
  // Blocks still at the device refer to this state, so it is never freed.
  static auto* const parked = new std::vector<std::shared_ptr<Work>>;
  static std::mutex mutex;
  {
    const std::scoped_lock lock(mutex);
    parked->push_back(std::move(work));
  }
  table.finish(RequestTable::Ending::parked);
}

}  // namespace ballast::aio
