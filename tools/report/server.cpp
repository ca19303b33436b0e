#include "tools/report/server.h"

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <string_view>
#include <utility>
#include <vector>

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>

#include "ballast/core/error.h"

namespace ballast::tools {
namespace {

constexpr std::size_t kLargestRequest = std::size_t{16} << 10U;
constexpr std::size_t kMostClients = 64;
constexpr int kPollMilliseconds = 250;

struct Client {
  Descriptor socket;
  std::string request;
};

[[noreturn]] void fail(const std::string& what) {
  const int error_number = errno;
  throw Error(ErrorCategory::io, what, error_number);
}

/// The value of a header line, "" without it. Names are in any case.
std::string header(std::string_view request, std::string_view name) {
  const auto lower = [](unsigned char c) { return static_cast<char>(std::tolower(c)); };
  while (!request.empty()) {
    const std::size_t end = request.find("\r\n");
    const std::string_view line = request.substr(0, end);
    const std::size_t colon = line.find(':');
    if (colon == name.size() &&
        std::equal(name.begin(), name.end(), line.begin(), [&](char a, char b) {
          return lower(static_cast<unsigned char>(a)) == lower(static_cast<unsigned char>(b));
        })) {
      const std::size_t value = line.find_first_not_of(' ', colon + 1);
      return value == std::string_view::npos ? "" : std::string(line.substr(value));
    }
    if (end == std::string_view::npos) break;
    request.remove_prefix(end + 2);
  }
  return "";
}

std::string text_of(const Reply& reply) {
  const char* reason = reply.status == 200   ? "OK"
                       : reply.status == 304 ? "Not Modified"
                       : reply.status == 404 ? "Not Found"
                                             : "Bad Request";
  std::string text = fmt::format(
      "HTTP/1.1 {} {}\r\nConnection: close\r\nCache-Control: no-cache\r\n"
      "X-Content-Type-Options: nosniff\r\n",
      reply.status, reason);
  if (!reply.tag.empty()) text += fmt::format("ETag: \"{}\"\r\n", reply.tag);
  if (!reply.type.empty()) text += fmt::format("Content-Type: {}\r\n", reply.type);
  text += fmt::format("Content-Length: {}\r\n\r\n", reply.body.size());
  return text + reply.body;
}

Reply refusal(int status, const char* why) {
  return {.status = status, .type = "text/plain", .body = std::string(why) + "\n", .tag = ""};
}

/// A page of another site could name this address as its own, so the host must be this machine.
bool is_local(const std::string& host, std::uint16_t port) {
  return host == fmt::format("127.0.0.1:{}", port) || host == fmt::format("localhost:{}", port);
}

Reply answer_request(const std::string& request, std::uint16_t port,
                     const std::function<Reply(const std::string&)>& answer) {
  if (!request.starts_with("GET /")) return refusal(400, "only GET is answered");
  if (!is_local(header(request, "host"), port)) return refusal(400, "this host is unknown here");
  std::string path = request.substr(4, request.find_first_of(" \r\n", 4) - 4);
  path.erase(std::min(path.find('?'), path.size()));
  Reply reply = answer(path);
  if (!reply.tag.empty() && header(request, "if-none-match") == '"' + reply.tag + '"') {
    reply.status = 304;
    reply.body.clear();
  }
  return reply;
}

/// Best effort: the client may be gone.
void send_all(const Descriptor& socket, std::string_view text) {
  while (!text.empty()) {
    const ssize_t sent = ::send(socket.number(), text.data(), text.size(), MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent <= 0) return;
    text.remove_prefix(static_cast<std::size_t>(sent));
  }
}

/// Reads what has arrived. False if the client is done or gone.
bool receive(Client& client) {
  std::string part(4096, '\0');
  const ssize_t count = ::recv(client.socket.number(), part.data(), part.size(), MSG_DONTWAIT);
  if (count < 0) return errno == EINTR || errno == EAGAIN || errno == EWOULDBLOCK;
  client.request.append(part, 0, static_cast<std::size_t>(count));
  return count > 0 && client.request.size() <= kLargestRequest;
}

void accept_client(const Descriptor& socket, std::vector<Client>& clients) {
  Descriptor accepted(::accept4(socket.number(), nullptr, nullptr, SOCK_CLOEXEC));
  if (!accepted.is_open()) return;
  constexpr timeval kPatience = {.tv_sec = 5, .tv_usec = 0};
  ::setsockopt(accepted.number(), SOL_SOCKET, SO_SNDTIMEO, &kPatience, sizeof kPatience);
  if (clients.size() == kMostClients) clients.erase(clients.begin());
  clients.push_back({std::move(accepted), ""});
}

}  // namespace

LocalServer::LocalServer(std::uint16_t port)
    : socket_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
  if (!socket_.is_open()) fail("cannot create a socket");
  const int on = 1;
  ::setsockopt(socket_.number(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  auto* const generic = reinterpret_cast<sockaddr*>(&address);
  if (::bind(socket_.number(), generic, size) != 0 || ::listen(socket_.number(), 16) != 0) {
    fail(fmt::format("cannot serve on 127.0.0.1:{}; choose another --port", port));
  }
  if (::getsockname(socket_.number(), generic, &size) != 0) fail("cannot get the port");
  port_ = ntohs(address.sin_port);
}

std::string LocalServer::address() const {
  return fmt::format("http://127.0.0.1:{}/", port_);
}

void LocalServer::run(const std::function<Reply(const std::string& path)>& answer,
                      const std::atomic<bool>& stop) {
  std::vector<Client> clients;
  while (!stop) {
    std::vector<pollfd> waiting = {{socket_.number(), POLLIN, 0}};
    for (const Client& client : clients) waiting.push_back({client.socket.number(), POLLIN, 0});
    if (::poll(waiting.data(), waiting.size(), kPollMilliseconds) < 0) {
      if (errno == EINTR) continue;
      fail("cannot wait for requests");
    }
    for (std::size_t i = clients.size(); i-- > 0;) {
      if (waiting[i + 1].revents == 0) continue;
      const bool open = receive(clients[i]);
      const bool whole = clients[i].request.find("\r\n\r\n") != std::string::npos;
      if (whole)
        send_all(clients[i].socket, text_of(answer_request(clients[i].request, port_, answer)));
      if (whole || !open) clients.erase(clients.begin() + static_cast<std::ptrdiff_t>(i));
    }
    if (waiting.front().revents != 0) accept_client(socket_, clients);
  }
}

}  // namespace ballast::tools
