#include "tools/live/view.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cctype>
#include <cerrno>
#include <cmath>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <string_view>
#include <utility>

#include <fmt/format.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

#include "ballast/core/clocks.h"
#include "ballast/core/units.h"

#include "tools/console/terminal.h"
#include "tools/signals.h"

namespace ballast::tools {

namespace {

constexpr std::string_view kEnter = "\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[2J";
constexpr std::string_view kLeave = "\x1b[?7h\x1b[?25h\x1b[?1049l";
// Terminals that support "synchronized output" show the whole frame at once; others ignore this.
constexpr std::string_view kBeginFrame = "\x1b[?2026h\x1b[H";
constexpr std::string_view kEndFrame = "\x1b[?2026l";

/// Data of the signal handlers.
struct SignalState {
  termios former = {};
  std::atomic<bool> entered = false;
  std::atomic<bool> stop = false;
  std::atomic<bool> resumed = false;
  std::atomic<int> event = -1;
};

SignalState& shared() {
  static SignalState all;
  return all;
}

void write_all(std::string_view text) {
  while (!text.empty()) {
    const auto count = ::write(STDOUT_FILENO, text.data(), text.size());
    if (count < 0 && errno != EINTR) return;  // the terminal is gone; the run has its files
    text.remove_prefix(count < 0 ? 0 : static_cast<std::size_t>(count));
  }
}

bool in_foreground() {
  return tcgetpgrp(STDIN_FILENO) == getpgrp();
}

/// Safe in signal handlers.
void restore() {
  if (!shared().entered.exchange(false)) return;
  write_all(kLeave);
  // In the background this call would stop the program, and the shell has set its own modes.
  if (in_foreground()) tcsetattr(STDIN_FILENO, TCSADRAIN, &shared().former);
}

void wake_by(int event) {
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(event, &one, sizeof(one));
}

extern "C" void on_stop(int number) {
  const int error_number = errno;
  (number == SIGTSTP ? shared().stop : shared().resumed).store(true);
  wake_by(shared().event.load());
  errno = error_number;
}

extern "C" void on_end(int number) {
  restore();
  std::raise(number);  // SA_RESETHAND: ends the program
}

constexpr std::array kEnding = {SIGQUIT, SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGILL};

/// Sets `handler` for a signal that has its default handler. Returns whether it did.
bool handle(int number, void (*handler)(int), int flags) {
  struct sigaction former = {};
  struct sigaction action = {};
  action.sa_handler = handler;
  action.sa_flags = flags;
  const bool standard = sigaction(number, nullptr, &former) == 0 && former.sa_handler == SIG_DFL;
  return standard && sigaction(number, &action, nullptr) == 0;
}

void forget(int number, void (*handler)(int)) {
  struct sigaction former = {};
  if (sigaction(number, nullptr, &former) == 0 && former.sa_handler == handler) {
    std::signal(number, SIG_DFL);
  }
}

bool is_utf8() {
  for (const char* name : {"LC_ALL", "LC_CTYPE", "LANG"}) {
    const char* const value = std::getenv(name);
    if (value == nullptr || *value == '\0') continue;
    std::string text = value;
    std::transform(text.begin(), text.end(), text.begin(),
                   [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
    return text.find("utf-8") != text.npos || text.find("utf8") != text.npos;
  }
  return false;
}

}  // namespace

bool Screen::available() {
  return Terminal::available() && isatty(STDIN_FILENO) == 1;
}

Screen::Screen() : event_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)), unicode_(is_utf8()) {
  shared().event = event_.number();
  shared().stop = false;
  shared().resumed = false;
  at_sudden_end(restore);
  for (const int number : {SIGTSTP, SIGCONT}) handle(number, on_stop, SA_RESTART);
  for (const int number : kEnding) handle(number, on_end, static_cast<int>(SA_RESETHAND));
}

Screen::~Screen() {
  leave();
  for (const int number : {SIGTSTP, SIGCONT}) forget(number, on_stop);
  for (const int number : kEnding) forget(number, on_end);
  at_sudden_end(nullptr);
  shared().event = -1;
}

void Screen::enter() {
  if (!in_foreground() || tcgetattr(STDIN_FILENO, &shared().former) != 0) return;
  termios keys = shared().former;
  keys.c_lflag &= ~static_cast<tcflag_t>(ICANON | ECHO);
  keys.c_cc[VMIN] = 1;
  keys.c_cc[VTIME] = 0;
  shared().entered = true;
  tcsetattr(STDIN_FILENO, TCSADRAIN, &keys);
  write_all(kEnter);
  entered_ = true;
}

void Screen::leave() {
  restore();
  entered_ = false;
}

FrameOptions Screen::options() const {
  FrameOptions options = {.unicode = unicode_};
  const char* const no_colour = std::getenv("NO_COLOR");
  options.colour = no_colour == nullptr || *no_colour == '\0';
  winsize size = {};
  if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 && size.ws_row > 0) {
    options.columns = size.ws_col;
    options.rows = size.ws_row;
  }
  return options;
}

void Screen::draw(const std::vector<std::string>& lines, std::size_t rows) const {
  if (!in_foreground()) return;
  std::string frame(kBeginFrame);
  for (std::size_t i = 0; i < lines.size(); ++i) frame += (i > 0 ? "\r\n" : "") + lines[i];
  if (lines.size() < rows) frame += "\r\n\x1b[J";  // "erase below"
  write_all(frame.append(kEndFrame));
}

Screen::Event Screen::wait(int milliseconds) {
  std::array<pollfd, 2> files = {pollfd{.fd = event_.number(), .events = POLLIN, .revents = 0},
                                 pollfd{.fd = STDIN_FILENO, .events = POLLIN, .revents = 0}};
  poll(files.data(), entered_ ? 2 : 1, milliseconds);
  std::uint64_t count = 0;
  [[maybe_unused]] auto got = ::read(event_.number(), &count, sizeof(count));
  if (shared().stop.exchange(false)) return Event::stop;
  if (shared().resumed.exchange(false)) return Event::resumed;
  if (entered_ && files[1].revents != 0) {
    std::array<char, 64> keys = {};
    got = ::read(STDIN_FILENO, keys.data(), keys.size());
    if (got == 0 || (got < 0 && errno != EINTR)) return Event::quit;  // the terminal is gone
    const std::string_view pressed(keys.data(), got > 0 ? static_cast<std::size_t>(got) : 0);
    if (pressed.find_first_of("qQ") != pressed.npos) return Event::quit;
  }
  return Event::none;
}

void Screen::wake() const {
  wake_by(event_.number());
}

void Screen::stop() {
  leave();
  forget(SIGTSTP, on_stop);
  std::raise(SIGTSTP);
  handle(SIGTSTP, on_stop, SA_RESTART);
}

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kMilliseconds = 200;
constexpr std::size_t kMaxHeld = 200;
constexpr std::size_t kMaxWarnings = 6;
constexpr std::size_t kPaceSteps = 100;
constexpr std::uint64_t kStepsBeforeEta = 3;

double share_of(double part, double whole) {
  return whole > 0.0 ? part / whole : 0.0;
}

Gauge tier_gauge(const std::string& name, Bytes used, Bytes budget) {
  return {.name = name,
          .share = share_of(static_cast<double>(used), static_cast<double>(budget)),
          .text = format_bytes(used) + " of " + format_bytes(budget)};
}

/// Gauges of the tiers that are used, one for each device.
std::vector<Gauge> tier_gauges(const train::StepMetrics& metrics, const memory::Budgets& budgets) {
  std::vector<Gauge> gauges;
  for (const Tier tier : kTiers) {
    const auto found = metrics.peak_bytes.find(std::string(to_string(tier)));
    if (found == metrics.peak_bytes.end() || found->second == 0) continue;
    const auto& [name, used] = *found;
    if (tier == Tier::nvme) {
      gauges.push_back({.name = name, .share = {}, .text = format_bytes(used)});
    } else if (tier == Tier::host || metrics.devices.empty()) {
      gauges.push_back(tier_gauge(name, used, tier == Tier::host ? budgets.host : budgets.device));
    } else {
      for (std::size_t d = 0; d < metrics.devices.size(); ++d) {
        gauges.push_back(tier_gauge(fmt::format("{} {}", name, d), metrics.devices[d].peak_bytes,
                                    budgets.device));
      }
    }
  }
  return gauges;
}

/// Gauges of the lanes that had work. If each device has the lane: of the mean, then of each
/// device.
std::vector<Gauge> lane_gauges(const train::StepMetrics& metrics) {
  std::vector<Gauge> gauges;
  for (const plan::Lane lane : plan::lanes_of(std::max<std::uint32_t>(1, metrics.devices.size()))) {
    const std::string name(to_string(lane));
    const auto busy = metrics.busy_seconds.find(name);
    if (busy == metrics.busy_seconds.end() || busy->second <= 0.0) continue;
    const double share = share_of(busy->second, metrics.step_seconds);
    const auto bytes = metrics.bytes.find(name);
    const bool moves = bytes != metrics.bytes.end() && bytes->second > 0;
    gauges.push_back({.name = name,
                      .share = share,
                      .text = fmt::format("{:3.0f}%{}", 100.0 * share,
                                          moves ? "  " + format_bytes(bytes->second) : "")});
    for (std::size_t d = 0; is_per_device(lane) && d < metrics.devices.size(); ++d) {
      const auto& times = metrics.devices[d].busy_seconds;
      const auto own = times.find(name);
      const double part = share_of(own == times.end() ? 0.0 : own->second, metrics.step_seconds);
      gauges.push_back({.name = fmt::format("  device {}", d),
                        .share = part,
                        .text = fmt::format("{:3.0f}%", 100.0 * part)});
    }
  }
  return gauges;
}

/// Estimates the time left at the pace of the last steps, and at the pace of all steps since the
/// view began. Both include all time between steps, evaluations and checkpoints.
std::optional<TimeLeft> time_left(std::uint64_t steps, const std::deque<Clock::time_point>& ends,
                                  Clock::time_point begin, std::uint64_t counted) {
  if (counted < kStepsBeforeEta) return std::nullopt;
  const auto left = static_cast<double>(steps);
  const double since = seconds_since(ends.back());
  const double all = seconds_between(begin, ends.back()) / static_cast<double>(counted);
  const double last =
      seconds_between(ends.front(), ends.back()) / static_cast<double>(ends.size() - 1);
  const auto estimate = [&](double pace) { return std::max(0.0, pace * left - since); };
  return TimeLeft{.low = estimate(std::min(all, last)),
                  .high = estimate(std::max(all, last)),
                  .steps = ends.size() - 1};
}

}  // namespace

LiveView::LiveView(std::string title, const train::RunStart& start)
    : budgets_(start.blueprint.budgets), begin_(Clock::now()) {
  state_.title = std::move(title);
  state_.step = start.resumed_step;
  state_.steps = start.steps;
  state_.doing = fmt::format("step {} running", start.resumed_step + 1);
  screen_.enter();
  set_line_taker(this);
  thread_ = std::thread([this] { watch(); });
}

LiveView::~LiveView() {
  stopped_ = true;
  screen_.wake();
  thread_.join();
  end();
  set_line_taker(nullptr);
}

void LiveView::stepped(const train::StepReport& report) {
  const train::StepMetrics& metrics = report.metrics;
  const std::lock_guard lock(mutex_);
  state_.step = metrics.step;
  state_.steps = report.steps;
  state_.loss = metrics.loss;
  if (metrics.loss) state_.losses.add(*metrics.loss);
  const auto& rewards = metrics.rewards;
  state_.numbers = !rewards ? ""
                            : fmt::format(", accuracy {:.0f}%, margin {:.4f}",
                                          100.0 * rewards->accuracy, rewards->margin());
  state_.numbers += fmt::format(
      ", lr {:.2e}, gradient norm {}{}", metrics.lr,
      metrics.skipped ? "not finite: skipped" : fmt::format("{:.3g}", metrics.grad_norm),
      metrics.eval_loss ? fmt::format(", held-out loss {:.4f}", *metrics.eval_loss) : "");
  state_.speed = fmt::format("{} tok/s, {} per step, {:.0f}% of the GEMM peak",
                             format_count(metrics.tokens_per_second),
                             format_seconds(metrics.step_seconds), 100.0 * report.gemm_share);
  state_.tiers = tier_gauges(metrics, budgets_);
  state_.lanes = lane_gauges(metrics);
  state_.doing = metrics.step == report.steps ? "the last step is done"
                                              : fmt::format("step {} running", metrics.step + 1);
  ends_.push_back(Clock::now());
  if (ends_.size() > kPaceSteps + 1) ends_.pop_front();
  ++counted_;
}

void LiveView::doing(const std::string& what) {
  const std::lock_guard lock(mutex_);
  state_.doing = what;
}

bool LiveView::take(const std::string& line, bool warning) {
  const std::lock_guard lock(mutex_);
  if (!shown_) return false;
  if (warning) {
    state_.warnings.push_back(line);
    if (state_.warnings.size() > kMaxWarnings) state_.warnings.pop_front();
  }
  held_.push_back({.line = line, .warning = warning});
  if (held_.size() > kMaxHeld) {
    held_.pop_front();
    ++dropped_;
  }
  return true;
}

void LiveView::draw() {
  LiveState state;
  {
    const std::lock_guard lock(mutex_);
    state = state_;
    state.left = time_left(state_.steps - state_.step, ends_, begin_, counted_);
  }
  state.elapsed = seconds_since(begin_);
  if (interrupted().load()) state.doing = "interrupted, the run ends with this step";
  const FrameOptions options = screen_.options();
  screen_.draw(frame_lines(state, options), options.rows);
}

void LiveView::watch() {
  while (!stopped_) {
    // A shell need not inform a program in the background that it is in the foreground again.
    if (!screen_.entered()) screen_.enter();
    if (screen_.entered()) draw();
    switch (screen_.wait(kMilliseconds)) {
      case Screen::Event::none:
        break;
      case Screen::Event::quit:
        end();
        set_line_taker(nullptr);
        return;
      case Screen::Event::stop:
        screen_.stop();
        break;
      case Screen::Event::resumed:  // also after SIGSTOP, when a shell has set the terminal
        screen_.leave();
        break;
    }
  }
}

/// Restores the terminal and prints the lines that were held back.
void LiveView::end() {
  const std::lock_guard lock(mutex_);
  if (!std::exchange(shown_, false)) return;
  screen_.leave();
  if (dropped_ > 0) {
    write_output(STDOUT_FILENO,
                 fmt::format("({} earlier lines; metrics.jsonl has all steps)\n", dropped_));
  }
  for (const Held& held : held_) {
    if (held.warning && isatty(STDERR_FILENO) != 1) continue;  // it is there already
    write_output(held.warning ? STDERR_FILENO : STDOUT_FILENO, held.line + "\n");
  }
  held_.clear();
}

}  // namespace ballast::tools
