#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "ballast/core/memory.h"
#include "ballast/setup/forecast.h"
#include "ballast/text/json.h"
#include "ballast/text/output_file.h"

/// Files of the page, made by embed.py.

namespace ballast::tools::assets {

extern const std::string_view kPageHtml;
extern const std::string_view kPageCss;
extern const std::string_view kFormatJs;
extern const std::string_view kChartJs;
extern const std::string_view kTimelineJs;
extern const std::string_view kTablesJs;
extern const std::string_view kBenchJs;
extern const std::string_view kPageJs;

}  // namespace ballast::tools::assets

namespace ballast::tools {

/// Returns a page that shows `data` and needs no other file and no network. See page.js for the
/// members of `data`.
std::string html_page(std::string_view title, const text::Json& data);

/// "2026-01-31 09:05 UTC"
std::string now_in_utc();

/// The page of `ballast plan --html`; `config` names the config.
std::string plan_page(const setup::Forecast& forecast, const std::filesystem::path& config);

/// The rule for pages: newer ones replace them.
text::OutputRule page_rule(bool overwrite, std::vector<std::filesystem::path> inputs = {});

/// The reply to a request.
struct Reply {
  int status = 200;
  std::string type;  ///< MIME type of the content
  std::string body;
  std::string tag;  ///< identifies the content; a client that already has it gets no body
};

/// Whether the host of a request or origin, with or without a port, names the loopback address. A
/// page of another site could give this server's address a name of its domain (DNS rebinding), but
/// not such a name. Any port is right: the browser may be at the other end of a tunnel.
bool is_loopback_host(std::string_view host);

/// Answers GET and HEAD requests on the loopback address, so only from this machine. Uses one
/// thread, and no client can block the others.
class LocalServer {
 public:
  using Answer = std::function<Reply(const std::string& path)>;

  /// `port` 0: any free port. Throws Error(io) if it is taken.
  explicit LocalServer(std::uint16_t port);

  [[nodiscard]] std::string address() const;  ///< "http://127.0.0.1:8080/"
  [[nodiscard]] std::uint16_t port() const { return port_; }
  /// Calls `answer` with the path of each request until `stop` is set. An Error of `answer` is sent
  /// to the client. Throws Error(io).
  void run(const Answer& answer, const std::atomic<bool>& stop);

 private:
  Descriptor socket_;
  std::uint16_t port_ = 0;
};

}  // namespace ballast::tools
