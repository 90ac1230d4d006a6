#pragma once

// The rules of fault_injection.cpp, from its environment variables.

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <string>
#include <string_view>

namespace fault_injection {

enum class Action { none, fail, half, end, slow, stop, kill, kill_after, kill_inside };

struct Rule {
  std::string op;
  Action action = Action::none;
  int error = 0;
  unsigned seconds = 0;  ///< of Action::slow
  long nth = 1;
  bool and_later = false;
  std::string path;
  std::atomic<long> calls = 0;
};

[[noreturn]] inline void refuse(const std::string& rule) {
  std::fprintf(stderr, "LOCKSTEP_FAULTS: '%s' is no rule\n", rule.c_str());
  std::_Exit(99);
}

inline int error_number(const std::string& name) {
  for (int error = 1; error < 134; ++error) {
    const char* const known = ::strerrorname_np(error);
    if (known != nullptr && name == known) return error;
  }
  return 0;
}

/// The number in "slow10"; 0 if it is another action.
inline unsigned seconds_of(const std::string& action) {
  const std::string slow = "slow";
  if (!action.starts_with(slow)) return 0;
  return static_cast<unsigned>(std::strtoul(action.c_str() + slow.size(), nullptr, 10));
}

inline std::string cut(std::string& text, char separator) {
  const size_t at = text.find(separator);
  std::string front = text.substr(0, at);
  text.erase(0, at == std::string::npos ? at : at + 1);
  return front;
}

inline void parse_rule(std::string text, Rule& rule) {
  const std::string whole = text;
  rule.op = cut(text, ':');
  const std::string action = cut(text, ':');
  const std::string nth = cut(text, ':');
  rule.path = text;
  rule.error = error_number(action);
  rule.seconds = seconds_of(action);
  rule.action = rule.error != 0           ? Action::fail
                : rule.seconds != 0       ? Action::slow
                : action == "short"       ? Action::half
                : action == "end"         ? Action::end
                : action == "stop"        ? Action::stop
                : action == "kill"        ? Action::kill
                : action == "kill-after"  ? Action::kill_after
                : action == "kill-inside" ? Action::kill_inside
                                          : Action::none;
  rule.nth = std::atol(nth.c_str());
  rule.and_later = nth.ends_with("+");
  if (rule.action == Action::none || rule.nth < 1 || rule.path.empty()) refuse(whole);
}

class Rules {
 public:
  Rules() {
    const auto variable = [](const char* name) {
      const char* const value = std::getenv(name);
      return std::string(value == nullptr ? "" : value);
    };
    log_ = variable("LOCKSTEP_FAULTS_COUNT");
    std::string text = variable("LOCKSTEP_FAULTS");
    const std::string rank = variable("LOCKSTEP_FAULTS_RANK");
    const std::string own = variable("RANK");
    if (!own.empty()) at_rank_ = "@" + own;
    if (!rank.empty() && rank != own) text.clear();
    while (!text.empty()) parse_rule(cut(text, ';'), rules_.emplace_back());
  }

  bool idle() const { return rules_.empty() && log_.empty(); }

  /// Counts the call. Returns the action, the errno for a failure and the seconds of a slow call.
  Action judge(std::string_view op, const std::string& path, int& error, unsigned& seconds) {
    if (!log_.empty()) note(op, path);
    for (Rule& rule : rules_) {
      if (rule.op != op || path.find(rule.path) == std::string::npos) continue;
      const long call = ++rule.calls;
      if (call != rule.nth && !(rule.and_later && call > rule.nth)) continue;
      error = rule.error;
      seconds = rule.seconds;
      return rule.action;
    }
    return Action::none;
  }

 private:
  /// Uses system calls, which this library does not intercept. Writes a line at once, so that lines
  /// of several processes do not mix.
  void note(std::string_view op, const std::string& path) const {
    const std::string line = std::string(op) + at_rank_ + " " + path + "\n";
    const long file = ::syscall(SYS_openat, AT_FDCWD, log_.c_str(),
                                O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (file < 0) return;
    ::syscall(SYS_write, file, line.data(), line.size());
    ::syscall(SYS_close, file);
  }

  std::deque<Rule> rules_;
  std::string log_, at_rank_;
};

}  // namespace fault_injection
