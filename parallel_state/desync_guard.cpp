#include "lockstep/parallel_state/desync_guard.h"

#include <algorithm>
#include <thread>

#include "lockstep/core/check.h"

namespace lockstep {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

/// Longer than a waiting rank takes to notice a failure.
constexpr milliseconds kAnswerTime{2000};
constexpr milliseconds kLookAgain{20};

std::string ledger_key(const std::string& name, int64_t rank) {
  return fmt::format("ledger/{}/{}", name, rank);
}

std::string rank_key(int64_t rank) { return fmt::format("doing/{}", rank); }

}  // namespace

DesyncGuard::DesyncGuard(std::shared_ptr<FailureBoard> board, int64_t rank)
    : board_(std::move(board)), rank_(rank) {}

DesyncGuard::~DesyncGuard() {
  if (!ledgers_.empty() && !has_failed_) publish("has ended");
}

std::shared_ptr<DesyncGuard::NamedLedger> DesyncGuard::ledger(const std::string& name) {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto& entry = ledgers_[name];
  if (!entry) entry = std::make_shared<NamedLedger>(name);
  return entry;
}

void DesyncGuard::publish(const std::string& elsewhere) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [name, ledger] : ledgers_)
    board_->write_note(ledger_key(name, rank_), ledger->serialize());
  board_->write_note(rank_key(rank_), elsewhere);
}

std::string DesyncGuard::explain(const RankList& ranks, const NamedLedger& ledger,
                                 const std::string& waits_for) const noexcept try {
  has_failed_ = true;
  publish("waits for " + waits_for);
  std::vector<RankAccount> accounts;
  for (const int64_t rank : ranks) accounts.push_back({.rank = rank, .entries = {}});
  const auto deadline = steady_clock::now() + kAnswerTime;
  const auto ask = [&](RankAccount& account) {
    const auto elsewhere = board_->read_note(rank_key(account.rank));
    if (!elsewhere) return false;
    account.answered = true;
    account.elsewhere = account.rank == rank_ ? "" : *elsewhere;
    const auto entries = board_->read_note(ledger_key(ledger.name, account.rank));
    if (entries) account.entries = CollectiveLedger::parse(*entries);
    return true;
  };
  for (RankAccount& account : accounts)
    while (!ask(account) && steady_clock::now() < deadline) std::this_thread::sleep_for(kLookAgain);
  return first_difference(accounts).value_or("");
} catch (const std::exception&) {
  return "";
}

}  // namespace lockstep
