#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>

#include "ballast/core/descriptor.h"

namespace ballast::tools {

/// What is sent for a path.
struct Reply {
  int status = 200;
  std::string type;  ///< of the content
  std::string body;
  std::string tag;  ///< names the content; a client that has it is sent no body
};

/// Answers GET requests on the loopback address, so only of this machine.
class LocalServer {
 public:
  /// `port` 0: any that is free. Throws Error(io) if it is taken.
  explicit LocalServer(std::uint16_t port);

  [[nodiscard]] std::string address() const;  ///< "http://127.0.0.1:8080/"
  /// Calls `answer` with the path of each request until `stop` is set. Throws Error(io).
  void run(const std::function<Reply(const std::string& path)>& answer,
           const std::atomic<bool>& stop);

 private:
  Descriptor socket_;
  std::uint16_t port_ = 0;
};

}  // namespace ballast::tools
