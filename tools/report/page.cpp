#include "tools/report/page.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cerrno>
#include <chrono>
#include <ctime>
#include <iterator>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include "ballast/core/error.h"
#include "ballast/core/machine.h"
#include "ballast/engine/blueprint.h"
#include "ballast/plan/simulator.h"

#include "tools/report/run_data.h"

namespace ballast::tools {

namespace {

using text::Json;

/// Start of each page, which distinguishes it from other files.
constexpr std::string_view kPageHead = "<!doctype html>\n<!-- A page of ballast. -->\n";

std::string escaped(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (c == '<') {
      out += "&lt;";
    } else if (c == '&') {
      out += "&amp;";
    } else {
      out += c;
    }
  }
  return out;
}

/// JSON for a script element, escaping '<', which it has only in strings.
std::string for_script(const Json& data) {
  const std::string text = data.compact();
  std::string out;
  out.reserve(text.size());
  for (const char c : text) {
    if (c == '<') {
      out += "\\u003c";
    } else {
      out += c;
    }
  }
  return out;
}

std::string script_text() {
  Json lanes = Json::array();
  for (const plan::Lane lane : plan::kDrawnLanes) lanes.push_back(to_string(lane));
  const std::string constants = fmt::format("const LANES = {};\n", lanes.compact());
  std::string text;
  for (const std::string_view part :
       {assets::kFormatJs, std::string_view(constants), assets::kChartJs, assets::kTimelineJs,
        assets::kTablesJs, assets::kBenchJs, assets::kPageJs}) {
    text += part;
  }
  return text;
}

}  // namespace

std::string now_in_utc() {
  const std::time_t now = std::time(nullptr);
  std::tm parts = {};
  gmtime_r(&now, &parts);
  return fmt::format("{:04}-{:02}-{:02} {:02}:{:02} UTC", parts.tm_year + 1900, parts.tm_mon + 1,
                     parts.tm_mday, parts.tm_hour, parts.tm_min);
}

std::string html_page(std::string_view title, const Json& data) {
  Json all = data;
  all["version"] = version();
  all["written"] = now_in_utc();
  const std::vector<std::pair<std::string_view, std::string>> parts = {
      {"@TITLE@", escaped(title)},
      {"@STYLE@", std::string(assets::kPageCss)},
      {"@DATA@", for_script(all)},
      {"@SCRIPT@", script_text()}};
  std::string page(kPageHead);
  std::string_view rest = assets::kPageHtml;
  for (const auto& [mark, text] : parts) {
    const std::size_t at = rest.find(mark);
    expects(at != std::string_view::npos, "a mark is missing in page.html, or not in its place");
    page += rest.substr(0, at);
    page += text;
    rest.remove_prefix(at + mark.size());
  }
  page += rest;
  return page;
}

std::string plan_page(const setup::Forecast& forecast, const std::filesystem::path& config) {
  const engine::Blueprint& blueprint = forecast.decision.blueprint;
  const plan::Prediction prediction =
      plan::simulate(blueprint.schedule, forecast.rates, {.timeline = true});
  Json lines = Json::array();
  for (const std::string& line : setup::describe(forecast)) lines.push_back(line);
  Json data = Json::object({{"kind", "plan"}, {"config_file", config.string()}, {"text", lines}});
  data["plan"] = text::parse_json(setup::to_json(forecast), "plan");
  if (forecast.wear) data["wear"] = setup::describe(*forecast.wear);
  data["timelines"] = Json::array({timeline_json(
      predicted_timeline(prediction.timeline, step::OperationNames(blueprint.problem)))});
  return html_page(fmt::format("Plan of {}", config.filename().string()), data);
}

text::OutputRule page_rule(bool overwrite, std::vector<std::filesystem::path> inputs) {
  return {.kind = "a page of ballast",
          .begins = std::string(kPageHead),
          .overwrite = overwrite,
          .inputs = std::move(inputs)};
}

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kLargestRequest = std::size_t{16} << 10U;
constexpr std::size_t kMaxClients = 32;
constexpr int kPollMilliseconds = 250;
/// Time limit of a whole request, and of a whole reply. Slower clients are dropped.
constexpr std::chrono::seconds kPatience{10};
/// Time limit for a client to close after its reply.
constexpr std::chrono::seconds kFarewell{2};

enum class Stage { request, reply, farewell };

struct Client {
  Descriptor socket;
  Stage stage = Stage::request;
  std::string text;  ///< received part of the request, or unsent part of the reply
  Clock::time_point until;
};

[[noreturn]] void fail(const std::string& what) {
  const int error_number = errno;
  throw Error(ErrorCategory::io, what, error_number);
}

std::string lower(std::string_view text) {
  std::string out(text);
  std::transform(out.begin(), out.end(), out.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return out;
}

/// The value of a header line, or nothing without it. Names are case-insensitive. Lines end with
/// .
std::optional<std::string> header(std::string_view request, std::string_view name) {
  while (!request.empty()) {
    const std::size_t end = std::min(request.find('\n'), request.size());
    const std::string_view line = request.substr(0, end);
    const std::size_t colon = line.find(':');
    if (colon != std::string_view::npos && lower(line.substr(0, colon)) == name) {
      const std::size_t value = line.find_first_not_of(' ', colon + 1);
      return value == std::string_view::npos ? "" : std::string(line.substr(value));
    }
    request.remove_prefix(std::min(end + 1, request.size()));
  }
  return std::nullopt;
}

std::string text_of(const Reply& reply, bool body) {
  const char* reason = reply.status == 200   ? "OK"
                       : reply.status == 304 ? "Not Modified"
                       : reply.status == 403 ? "Forbidden"
                       : reply.status == 404 ? "Not Found"
                       : reply.status == 405 ? "Method Not Allowed\r\nAllow: GET, HEAD"
                       : reply.status == 431 ? "Request Header Fields Too Large"
                       : reply.status == 500 ? "Internal Server Error"
                                             : "Bad Request";
  // Keeps pages of other sites from framing the page and from loading the data as a script.
  std::string text = fmt::format(
      "HTTP/1.1 {} {}\r\nConnection: close\r\nCache-Control: no-cache\r\n"
      "X-Content-Type-Options: nosniff\r\nX-Frame-Options: DENY\r\n"
      "Cross-Origin-Resource-Policy: same-origin\r\n",
      reply.status, reason);
  if (!reply.tag.empty()) text += fmt::format("ETag: \"{}\"\r\n", reply.tag);
  if (!reply.type.empty()) text += fmt::format("Content-Type: {}\r\n", reply.type);
  text += fmt::format("Content-Length: {}\r\n\r\n", reply.body.size());
  return body ? text + reply.body : text;
}

Reply refusal(int status, const char* why) {
  return {.status = status, .type = "text/plain", .body = std::string(why) + "\n", .tag = ""};
}

/// Whether a page of another site has sent the request. Following a link to the report is allowed.
bool is_cross_site(std::string_view headers) {
  const auto origin = header(headers, "origin");
  if (origin) {
    const std::size_t host = origin->find("://");
    return host == std::string::npos || !is_loopback_host(origin->substr(host + 3));
  }
  return header(headers, "sec-fetch-site").value_or("") == "cross-site" &&
         header(headers, "sec-fetch-mode").value_or("navigate") != "navigate";
}

/// `lines`: the request line and its headers.
Reply answer_request(std::string_view lines, bool head, const LocalServer::Answer& answer) {
  const std::string_view first = lines.substr(0, lines.find('\n'));
  const std::size_t at = first.find(' ');
  const std::size_t end = first.rfind(" HTTP/1.");
  const bool whole = at != std::string_view::npos && end != std::string_view::npos && at < end &&
                     first.substr(at + 1, 1) == "/";
  if (!whole) return refusal(400, "this is not a request of HTTP/1.1");
  if (!head && first.substr(0, at) != "GET") return refusal(405, "only GET and HEAD are answered");
  const std::string_view headers = lines.substr(std::min(first.size() + 1, lines.size()));
  const auto host = header(headers, "host");
  const bool needs_host = first.substr(end) != " HTTP/1.0";
  if (needs_host && !host) return refusal(400, "the request has no host");
  if (host && !is_loopback_host(*host)) {
    return refusal(403, "only names of this machine's loopback address are served: localhost");
  }
  if (is_cross_site(headers)) return refusal(403, "pages of other sites are not served");
  std::string path(first.substr(at + 1, end - at - 1));
  path.erase(std::min(path.find('?'), path.size()));
  Reply reply;
  try {
    reply = answer(path);
  } catch (const Error& error) {
    return refusal(500, error.what());
  }
  if (!reply.tag.empty() && header(headers, "if-none-match") == '"' + reply.tag + '"') {
    reply.status = 304;
    reply.body.clear();
  }
  return reply;
}

void reply_to(Client& client, const std::string& text) {
  client.stage = Stage::reply;
  client.text = text;
  client.until = Clock::now() + kPatience;
}

/// Reads available bytes. Returns false if the client is gone.
bool receive(Client& client, const LocalServer::Answer& answer) {
  std::array<char, 4096> part{};
  const ssize_t count = ::recv(client.socket.number(), part.data(), part.size(), MSG_DONTWAIT);
  if (count < 0) return errno == EINTR || errno == EAGAIN || errno == EWOULDBLOCK;
  if (count == 0) return false;
  if (client.stage != Stage::request) return true;  // a body, which is ignored
  std::copy_if(part.data(), part.data() + count, std::back_inserter(client.text),
               [](char c) { return c != '\r'; });
  const std::size_t end = client.text.find("\n\n");
  if (end != std::string::npos) {
    const std::string lines = client.text.substr(0, end);
    const bool head = lines.starts_with("HEAD ");
    reply_to(client, text_of(answer_request(lines, head, answer), !head));
  } else if (client.text.size() > kLargestRequest) {
    reply_to(client, text_of(refusal(431, "the request is too large"), true));
  }
  return true;
}

/// Sends as much as the client accepts. Returns false if it is gone.
bool send_some(Client& client) {
  const ssize_t sent = ::send(client.socket.number(), client.text.data(), client.text.size(),
                              MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent < 0) return errno == EINTR || errno == EAGAIN || errno == EWOULDBLOCK;
  client.text.erase(0, static_cast<std::size_t>(sent));
  if (!client.text.empty()) return true;
  // Closing while a body arrives would reset the connection before the reply is read.
  client.stage = Stage::farewell;
  client.until = Clock::now() + kFarewell;
  return ::shutdown(client.socket.number(), SHUT_WR) == 0;
}

/// Returns false if the client is done, gone or too slow.
bool serve(Client& client, short ready, const LocalServer::Answer& answer) {
  if (Clock::now() >= client.until) return false;
  if (ready == 0) return true;
  if ((ready & POLLIN) != 0 && !receive(client, answer)) return false;
  if (client.stage == Stage::reply) return send_some(client);
  return (ready & POLLIN) != 0;  // otherwise an error or the end
}

void accept_client(const Descriptor& socket, std::vector<Client>& clients) {
  Descriptor accepted(::accept4(socket.number(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  const bool full = !accepted.is_open() && (errno == EMFILE || errno == ENFILE);
  if ((full || clients.size() == kMaxClients) && !clients.empty()) clients.erase(clients.begin());
  if (full) std::this_thread::sleep_for(std::chrono::milliseconds(kPollMilliseconds));
  if (accepted.is_open()) {
    clients.push_back({std::move(accepted), Stage::request, "", Clock::now() + kPatience});
  }
}

}  // namespace

bool is_loopback_host(std::string_view host) {
  std::string name = lower(host);
  const std::size_t port = name.find(':', name.starts_with('[') ? name.find(']') : 0);
  if (port != std::string::npos) {
    const std::string digits = name.substr(port + 1);
    if (digits.empty() || digits.find_first_not_of("0123456789") != std::string::npos) return false;
    name.erase(port);
  }
  return name == "localhost" || name == "127.0.0.1" || name == "[::1]";
}

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
    fail(
        fmt::format("cannot serve on 127.0.0.1:{}; choose another --port, or leave it out for one "
                    "that is free",
                    port));
  }
  if (::getsockname(socket_.number(), generic, &size) != 0) fail("cannot get the port");
  port_ = ntohs(address.sin_port);
}

std::string LocalServer::address() const {
  return fmt::format("http://127.0.0.1:{}/", port_);
}

void LocalServer::run(const Answer& answer, const std::atomic<bool>& stop) {
  std::vector<Client> clients;
  while (!stop) {
    std::vector<pollfd> waiting = {{socket_.number(), POLLIN, 0}};
    for (const Client& client : clients) {
      const short wanted = client.stage == Stage::reply ? POLLOUT : POLLIN;
      waiting.push_back({client.socket.number(), wanted, 0});
    }
    if (::poll(waiting.data(), waiting.size(), kPollMilliseconds) < 0) {
      if (errno == EINTR) continue;
      fail("cannot wait for requests");
    }
    for (std::size_t i = clients.size(); i-- > 0;) {
      if (serve(clients[i], waiting[i + 1].revents, answer)) continue;
      clients.erase(clients.begin() + static_cast<std::ptrdiff_t>(i));
    }
    if (waiting.front().revents != 0) accept_client(socket_, clients);
  }
}

}  // namespace ballast::tools
