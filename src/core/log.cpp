#include "ballast/core/log.h"

#include <mutex>
#include <utility>

namespace ballast {
namespace {

std::mutex& sink_mutex() {
  static std::mutex mutex;
  return mutex;
}

LogSink& sink() {
  static LogSink instance;
  return instance;
}

}  // namespace

LogSink set_log_sink(LogSink new_sink) {
  const std::scoped_lock lock(sink_mutex());
  return std::exchange(sink(), std::move(new_sink));
}

void log(LogLevel level, std::string_view line) {
  const std::scoped_lock lock(sink_mutex());
  if (sink()) sink()(level, line);
}

}  // namespace ballast
