#include "lockstep/parallel_state/launch_channel.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <sstream>

#include "lockstep/core/check.h"

namespace lockstep {
namespace {

constexpr char kChannelVariable[] = "LOCKSTEP_LAUNCH_CHANNEL";
constexpr char kTimeout[] = "timeout", kWaits[] = "waits", kOver[] = "over", kRound[] = "round",
               kEnd[] = "end";
constexpr size_t kLongest = 1 << 16;  // bytes

/// The first line, and the text after it.
std::pair<std::string, std::string> split(const std::string& text) {
  const size_t end = text.find('\n');
  if (end == std::string::npos) return {text, ""};
  return {text.substr(0, end), text.substr(end + 1)};
}

template <class Number>
Number number_in(const std::string& text) {
  Number number = 0;
  std::from_chars(text.data(), text.data() + text.size(), number);
  return number;
}

bool is_message_socket(int descriptor) {
  int type = 0;
  socklen_t size = sizeof type;
  return ::getsockopt(descriptor, SOL_SOCKET, SO_TYPE, &type, &size) == 0 && type == SOCK_SEQPACKET;
}

LaunchOrder parse_order(const std::string& kind, const std::string& text) {
  LaunchOrder order;
  if (kind == kEnd) {
    const auto [status, reason] = split(text);
    order.status = number_in<int>(status);
    order.reason = reason;
    return order;
  }
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const size_t equals = line.find('=');
    if (equals != std::string::npos)
      order.round.emplace_back(line.substr(0, equals), line.substr(equals + 1));
  }
  return order;
}

WaitingRank parse_waiting(const std::string& text) {
  const auto [sizes, rest] = split(text);
  const auto [limits, copies] = split(rest);
  WaitingRank rank{.world_sizes = {}, .limits = limits, .copies = copies};
  std::istringstream words(sizes);
  for (int64_t size = 0; words >> size;) rank.world_sizes.push_back(size);
  return rank;
}

}  // namespace

MessageSocket::~MessageSocket() { ::close(descriptor_); }

bool MessageSocket::send(const std::string& message) const {
  ssize_t sent = 0;
  do sent = ::send(descriptor_, message.data(), message.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  while (sent < 0 && errno == EINTR);
  return sent >= 0;
}

std::optional<std::string> MessageSocket::receive(Wait wait, bool keep) const {
  std::string message(kLongest, '\0');
  const int flags = (wait == Wait::no ? MSG_DONTWAIT : 0) | (keep ? MSG_PEEK : 0);
  ssize_t received = 0;
  do received = ::recv(descriptor_, message.data(), message.size(), flags);
  while (received < 0 && errno == EINTR);
  if (received <= 0) return std::nullopt;
  message.resize(static_cast<size_t>(received));
  return message;
}

std::unique_ptr<LaunchChannel> LaunchChannel::of_this_process() {
  const char* const value = std::getenv(kChannelVariable);
  if (!value) return nullptr;
  const int descriptor = number_in<int>(value);
  if (descriptor <= STDERR_FILENO || !is_message_socket(descriptor)) return nullptr;
  ::fcntl(descriptor, F_SETFD, FD_CLOEXEC);
  return std::make_unique<LaunchChannel>(descriptor);
}

int LaunchChannel::spare_of() {
  const char* const value = std::getenv(kSpareVariable);
  return value ? number_in<int>(value) : 0;
}

LaunchEnvironment LaunchChannel::in_slot(LaunchEnvironment environment) {
  const char* const value = std::getenv(kSlotVariable);
  if (!value) return environment;
  environment.local_rank = number_in<int>(value);
  environment.local_world_size = std::max(environment.local_world_size, environment.local_rank + 1);
  return environment;
}

void LaunchChannel::announce(std::chrono::milliseconds timeout, const std::string& folder) const {
  socket_.send(fmt::format("{}\n{}\n{}", kTimeout, timeout.count(), folder));
}

std::optional<std::string> LaunchChannel::round_is_over() const {
  const auto message = socket_.receive(MessageSocket::Wait::no, /*keep=*/true);
  return message ? std::optional(split(*message).second) : std::nullopt;
}

LaunchOrder LaunchChannel::wait_for_order(const WaitingRank& rank,
                                          const std::function<void()>& arrived) const {
  socket_.send(fmt::format("{}\n{}\n{}\n{}", kWaits, fmt::join(rank.world_sizes, " "), rank.limits,
                           rank.copies));
  while (const auto message = socket_.receive(MessageSocket::Wait::until_there, /*keep=*/true)) {
    const auto [kind, text] = split(*message);
    if (kind != kOver && arrived) arrived();
    socket_.receive(MessageSocket::Wait::no);
    if (kind != kOver) return parse_order(kind, text);
  }
  fail<CommunicationError>("the launcher has exited");
}

RankChannel::RankChannel() {
  std::array<int, 2> ends = {};
  const bool made = ::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends.data()) == 0;
  require<UsageError>(made, "a rank of an elastic run needs a socket pair: {}",
                      std::strerror(errno));
  own_ = std::make_unique<MessageSocket>(ends[0]);
  rank_end_ = std::make_unique<MessageSocket>(ends[1]);
}

void RankChannel::hand_over(int slot) const {
  ::fcntl(rank_end_->descriptor(), F_SETFD, 0);
  ::setenv(kChannelVariable, std::to_string(rank_end_->descriptor()).c_str(), /*overwrite=*/1);
  ::setenv(kSlotVariable, std::to_string(slot).c_str(), /*overwrite=*/1);
}

void RankChannel::tell_round_is_over(const std::string& reason) const {
  own_->send(fmt::format("{}\n{}", kOver, reason));
}

void RankChannel::give(const LaunchOrder& order) const {
  if (order.status) {
    own_->send(fmt::format("{}\n{}\n{}", kEnd, *order.status, order.reason));
    return;
  }
  std::string text = kRound;
  for (const auto& [name, value] : order.round) text += fmt::format("\n{}={}", name, value);
  own_->send(text);
}

std::optional<RankChannel::Word> RankChannel::receive() const {
  const auto message = own_->receive(MessageSocket::Wait::no);
  if (!message) return std::nullopt;
  const auto [kind, text] = split(*message);
  Word word;
  if (kind == kTimeout) {
    const auto [timeout, folder] = split(text);
    word.timeout = std::chrono::milliseconds(number_in<int64_t>(timeout));
    word.folder = folder;
  }
  if (kind == kWaits) word.waits = parse_waiting(text);
  return word;
}

EnvironmentReader over(VariableList variables, EnvironmentReader environment) {
  return [variables = std::move(variables),
          environment = std::move(environment)](const char* name) -> std::optional<std::string> {
    const auto found = std::find_if(variables.begin(), variables.end(),
                                    [&](const auto& variable) { return variable.first == name; });
    return found == variables.end() ? environment(name) : std::optional(found->second);
  };
}

}  // namespace lockstep
