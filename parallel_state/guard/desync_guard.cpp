#include "lockstep/parallel_state/desync_guard.h"

#include <algorithm>
#include <thread>

#include "lockstep/core/check.h"
#include "lockstep/core/text_digest.h"
#include "lockstep/parallel_state/rank_message.h"

namespace lockstep {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr milliseconds kLookAgain{20};
constexpr size_t kMostThatAllCompare = 64;  // ranks
constexpr char kHasEnded[] = "has ended";

/// The names of large groups would be too long for a key.
std::string ledger_key(const std::string& name, int64_t rank) {
  return fmt::format("ledger/{:016x}/{}", text_digest(name), rank);
}

/// Where the rank that compares a large group writes what it has found.
std::string difference_key(const std::string& name) {
  return fmt::format("difference/{:016x}", text_digest(name));
}

std::string rank_key(int64_t rank) { return fmt::format("doing/{}", rank); }

/// Messages are in no ledger; it is enough to say that their other end has ended.
std::string ended_among(const std::vector<RankAccount>& accounts) {
  for (const RankAccount& account : accounts)
    if (account.elsewhere == kHasEnded) return fmt::format("rank {} {}", account.rank, kHasEnded);
  return "";
}

}  // namespace

DesyncGuard::DesyncGuard(std::shared_ptr<FailureBoard> board, int64_t rank)
    : board_(std::move(board)), rank_(rank) {}

void DesyncGuard::say_end() const noexcept {
  if (has_failed_ || board_->lost_server()) return;
  try {
    publish(kHasEnded);
  } catch (const std::exception&) {
    // The store is gone with the process that served it.
  }
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

FailureBoard::Lost DesyncGuard::find_lost(const RankList& ranks) const {
  return board_->find_lost(ranks, rank_key);
}

DesyncGuard::Explanation DesyncGuard::explain(const RankList& ranks, const NamedLedger* ledger,
                                              const std::string& waits_for,
                                              const std::string& reason) const noexcept {
  has_failed_ = true;
  Explanation result{.culprit = "", .reason = reason, .difference = "", .failed = ""};
  try {
    if (board_->lost_server()) return without_store(reason);
    publish("waits for " + waits_for);
    if (const auto posted = board_->ask()) {
      result = explained_by(*posted);
    } else {
      const FailureBoard::Lost lost = find_lost(ranks);
      result.culprit = lost.text();
      board_->post_operation(fmt::format("{} failed: {}", waits_for, reason), lost);
    }
    if (ledger && result.culprit.empty() && result.failed.empty())
      result.difference = ranks.size() > kMostThatAllCompare ? shared_difference(ranks, *ledger)
                                                             : difference(ranks, *ledger);
    return result;
  } catch (const std::exception&) {
    return result.culprit.empty() ? without_store(result.reason) : result;
  }
}

DesyncGuard::Explanation DesyncGuard::explained_by(const Failure& posted) {
  if (posted.own) return {.culprit = "", .reason = "", .difference = "", .failed = posted.text()};
  return {.culprit = posted.culprit,
          .reason = told_by_rank(posted.rank, posted.message),
          .difference = "",
          .failed = ""};
}

/// What was posted while the store could still be asked comes first: the rank that serves it leaves
/// soon after a failure. A launcher's store may be silent while all ranks live. If ranks on this
/// host have ended, they are named first; otherwise the host of the store, which does not answer.
DesyncGuard::Explanation DesyncGuard::without_store(const std::string& reason) const {
  if (const auto posted = board_->find()) return explained_by(*posted);
  const std::string server = board_->lost_server().value_or("");
  const std::string here = board_->rank_serves() ? "" : board_->find_lost_here().text();
  if (here.empty()) return {.culprit = server, .reason = reason, .difference = "", .failed = ""};
  return {.culprit = here,
          .reason = reason + (server.empty() ? "" : "; " + server),
          .difference = "",
          .failed = ""};
}

/// If each of many ranks asked about all others, the store would take minutes to answer.
std::string DesyncGuard::shared_difference(const RankList& ranks, const NamedLedger& ledger) const {
  const std::string key = difference_key(ledger.name);
  for (int attempt = 0; attempt < 2; ++attempt) {  // the first one that compares may be lost
    if (board_->claim(fmt::format("{}/{}", key, attempt))) {
      const std::string found = difference(ranks, ledger);
      board_->write_note(key, found);
      return found;
    }
    const auto deadline = steady_clock::now() + 2 * kAnswerTime;  // it waits for ranks as long
    do {
      if (const auto found = board_->read_note(key)) return *found;
      std::this_thread::sleep_for(kLookAgain);
    } while (steady_clock::now() < deadline);
  }
  return "";
}

std::string DesyncGuard::difference(const RankList& ranks, const NamedLedger& ledger) const {
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
  return first_difference(accounts).value_or(ended_among(accounts));
}

}  // namespace lockstep
