#include "lockstep/parallel_state/agent_rounds.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "lockstep/core/check.h"
#include "lockstep/parallel_state/gathering.h"

namespace lockstep {
namespace {

constexpr char kRounds[] = "rounds";
constexpr char kTickets[] = "tickets";

std::string answer_key(int64_t ticket) { return fmt::format("round of ticket/{}", ticket); }

}  // namespace

AgentRounds::AgentRounds(const c10::intrusive_ptr<c10d::Store>& store, const std::string& run_id)
    : keys_(c10::make_intrusive<c10d::PrefixStore>("lockstep rounds/" + run_id, store)) {}

int64_t AgentRounds::begin() {
  number_ = keys_->add(kRounds, 1) - 1;
  admit();
  return number_;
}

void AgentRounds::admit() {
  const int64_t tickets = keys_->add(kTickets, 0);
  while (admitted_ < tickets) keys_->set(answer_key(++admitted_), std::to_string(number_));
}

std::optional<int64_t> AgentRounds::await(int64_t ranks,
                                          std::chrono::steady_clock::time_point deadline,
                                          const std::function<bool()>& give_up) {
  const std::string key = answer_key(keys_->add(kTickets, 1));
  if (!wait_for_key(*keys_, key, ranks, deadline, give_up)) return std::nullopt;
  return std::stoll(keys_->get_to_str(key));
}

}  // namespace lockstep
