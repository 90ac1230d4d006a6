#include "lockstep/parallel_state/failure_board.h"

#include <algorithm>

#include "lockstep/core/check.h"
#include "lockstep/parallel_state/process_mark.h"
#include "lockstep/parallel_state/rank_message.h"
#include "lockstep/parallel_state/store_client.h"

namespace lockstep {
namespace {

using std::chrono::milliseconds;

constexpr char kKey[] = "failure", kNumberLost[] = "lost";
constexpr char kFieldEnd = '\n';
constexpr size_t kMostLookedFor = 64;
constexpr milliseconds kLeastPeriod{250}, kBeatPause{20}, kMarkPause{50};
constexpr int kBeatsToMiss = 5;

std::string note_key(const std::string& key) { return "note/" + key; }
std::string beat_key(int64_t rank) { return fmt::format("beat/{}", rank); }
std::string process_key(int64_t rank) { return fmt::format("process/{}", rank); }

std::optional<std::string> read(c10d::Store& store, const std::string& key) {
  if (!store.check({key})) return std::nullopt;
  return store.get_to_str(key);
}

std::string encode_failure(const Failure& failure) {
  return fmt::format("{1}{0}{2}{0}{3}{0}{4}", kFieldEnd, failure.rank, failure.own ? "own" : "",
                     failure.culprit, failure.message);
}

Failure decode_failure(std::string text) {
  const auto next = [&] {
    const size_t end = text.find(kFieldEnd);
    std::string field = text.substr(0, end);
    text.erase(0, end + 1);
    return field;
  };
  Failure failure{.rank = std::stoll(next()), .culprit = "", .message = ""};
  failure.own = !next().empty();
  failure.culprit = next();
  failure.message = text;
  return failure;
}

std::string list(RankList ranks, const char* one, const char* several) {
  std::sort(ranks.begin(), ranks.end());
  return fmt::format("rank{} {} {}", ranks.size() == 1 ? "" : "s", fmt::join(ranks, ", "),
                     ranks.size() == 1 ? one : several);
}

}  // namespace

std::string Failure::text() const {
  return fmt::format("{}{}{}", culprit, culprit.empty() ? "" : ": ", told_by_rank(rank, message));
}

std::optional<Failure> posted_failure(c10d::Store& store) {
  const auto text = read(store, kKey);
  return text ? std::optional(decode_failure(*text)) : std::nullopt;
}

void note_process(c10d::Store& store, int64_t rank) {
  store.set(process_key(rank), process_mark());
}

void take_process_back(c10d::Store& store, int64_t rank) { store.set(process_key(rank), ""); }

RankList ended_processes(c10d::Store& store, const RankList& ranks) {
  RankList ended;
  if (ranks.size() > kMostLookedFor) return ended;
  std::copy_if(ranks.begin(), ranks.end(), std::back_inserter(ended), [&](int64_t rank) {
    return process_has_ended(read(store, process_key(rank)).value_or(""));
  });
  return ended;
}

int64_t number_lost(c10d::Store& store) { return store.add(kNumberLost, 0); }

std::string FailureBoard::Lost::text() const {
  if (!gone.empty()) return list(gone, "has exited", "have exited");
  return silent.empty() ? "" : list(silent, "does not answer", "do not answer");
}

FailureBoard::FailureBoard(const c10::intrusive_ptr<c10d::Store>& store, int64_t rank,
                           int64_t world_size)
    : rank_(rank),
      world_size_(world_size),
      period_(std::max(kLeastPeriod, milliseconds(world_size / 2))) {
  if (!store) return;
  store_ = store->clone();
  const auto below = store_below(store_);
  // Some stores in this process are their own clones: those keep the timeout that their owner set.
  if (below != store_below(store)) store_->setTimeout(kAnswerTime);
  client_ = dynamic_cast<StoreClient*>(below.get());
  lookout_ = std::thread([this] { look_out(); });
}

FailureBoard::~FailureBoard() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ended_ = true;
  }
  wake_.notify_all();
  if (client_) client_->interrupt();
  if (lookout_.joinable()) lookout_.join();
}

void FailureBoard::post(const std::string& message) const noexcept {
  post({.rank = rank_, .culprit = "", .message = message, .own = true}, 0);
}

void FailureBoard::post_operation(const std::string& message, const Lost& lost) const noexcept {
  post({.rank = rank_, .culprit = lost.text(), .message = message},
       static_cast<int64_t>(lost.gone.size() + lost.silent.size()));
}

void FailureBoard::post(const Failure& failure, int64_t lost) const noexcept {
  if (!store_) return;
  posted_ = true;
  if (lost_server()) return;
  try {
    const std::string mine = encode_failure(failure);
    if (store_->compareSet(kKey, "", mine) == mine) store_->add(kNumberLost, lost);
  } catch (const std::exception&) {
    // The store is gone with the process that served it; the peers see their connections close.
  }
}

std::optional<Failure> FailureBoard::find() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return found_;
}

std::optional<Failure> FailureBoard::ask() const {
  auto found = find();
  if (found || !store_) return found;
  found = posted_failure(*store_);
  return found && found->rank == rank_ ? std::nullopt : found;
}

void FailureBoard::write_note(const std::string& key, const std::string& text) const {
  if (store_) store_->set(note_key(key), text);
}

std::optional<std::string> FailureBoard::read_note(const std::string& key) const {
  return store_ ? read(*store_, note_key(key)) : std::nullopt;
}

bool FailureBoard::claim(const std::string& key) const {
  return !store_ || store_->add("claim/" + key, 1) == 1;
}

int64_t FailureBoard::beats_of(int64_t rank) const { return store_->add(beat_key(rank), 0); }

FailureBoard::Lost FailureBoard::find_lost(
    const RankList& ranks, const std::function<std::string(int64_t)>& note_of) const {
  if (!store_) return {};
  RankList open = ranks;
  for (int64_t rank = 0; rank < world_size_ && open.size() <= kMostLookedFor; ++rank)
    if (std::find(ranks.begin(), ranks.end(), rank) == ranks.end()) open.push_back(rank);
  std::erase(open, rank_);
  if (open.size() > kMostLookedFor) open.resize(kMostLookedFor);
  std::vector<int64_t> first;
  for (const int64_t rank : open) first.push_back(beats_of(rank));
  const auto deadline = Clock::now() + kBeatsToMiss * period_;
  for (;;) {
    for (size_t i = open.size(); i-- > 0;) {
      if (!read_note(note_of(open[i])) && beats_of(open[i]) == first[i]) continue;
      open.erase(open.begin() + static_cast<std::ptrdiff_t>(i));
      first.erase(first.begin() + static_cast<std::ptrdiff_t>(i));
    }
    const RankList gone = ended_processes(*store_, open);
    if (!gone.empty() || open.empty()) return {gone, {}};
    if (Clock::now() >= deadline) return {{}, open};
    std::this_thread::sleep_for(kBeatPause);
  }
}

FailureBoard::Lost FailureBoard::find_gone(const RankList& ranks) const {
  return {store_ ? ended_processes(*store_, ranks) : RankList(), {}};
}

std::optional<std::string> FailureBoard::find_obstacle(const RankList& ranks) const {
  if (const auto posted = find()) return posted->text();
  const Lost lost = find_gone(ranks);
  return lost.none() ? std::nullopt : std::optional(lost.text());
}

FailureBoard::Lost FailureBoard::find_lost_here() const {
  Lost lost;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (size_t rank = 0; rank < marks_.size(); ++rank) {
    if (process_has_ended(marks_[rank])) lost.gone.push_back(static_cast<int64_t>(rank));
    if (process_has_stopped(marks_[rank])) lost.silent.push_back(static_cast<int64_t>(rank));
  }
  return lost;
}

bool FailureBoard::rank_serves() const { return client_ && !client_->address().of_launcher; }

std::optional<std::string> FailureBoard::lost_server() const {
  if (!client_) return std::nullopt;
  const std::string& server = client_->address().server;
  if (client_->server_has_gone()) return server + " has exited";
  const Clock::rep since = unanswered_since_;
  const auto silence = Clock::now().time_since_epoch() - Clock::duration(since);
  if (since == 0 || silence < kAnswerTime) return std::nullopt;
  return fmt::format("{} has not answered for {:.1f} s", server,
                     std::chrono::duration<double>(silence).count());
}

std::optional<std::string> FailureBoard::lost_launcher() const {
  if (!client_ || !client_->address().of_launcher || !client_->server_has_gone())
    return std::nullopt;
  return client_->address().server + " has exited";
}

bool FailureBoard::awaits_marks() const {
  return marks_.empty() && client_ && client_->address().of_launcher &&
         world_size_ <= static_cast<int64_t>(kMostLookedFor);
}

void FailureBoard::remember_processes() {
  if (!awaits_marks()) return;
  std::vector<std::string> keys;
  for (int64_t rank = 0; rank < world_size_; ++rank) keys.push_back(process_key(rank));
  if (!store_->check(keys)) return;  // not all have arrived yet
  const auto marks = store_->multiGet(keys);
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& mark : marks) marks_.emplace_back(mark.begin(), mark.end());
}

void FailureBoard::look() {
  if (client_ && client_->server_has_gone()) return;
  if (unanswered_since_ == 0) unanswered_since_ = Clock::now().time_since_epoch().count();
  try {
    remember_processes();
    store_->add(beat_key(rank_), 1);
    const auto failure = posted_failure(*store_);
    unanswered_since_ = 0;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (failure && failure->rank != rank_) found_ = failure;
  } catch (const std::exception&) {
    // lost_server() reports it.
  }
}

void FailureBoard::look_out() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    lock.unlock();
    look();
    lock.lock();
    if (posted_ || found_)
      for (std::function<void()>& abort : watched_)
        if (abort) std::exchange(abort, nullptr)();
    // Short until all processes' marks are known: without the store nobody could ask for them.
    const auto pause = awaits_marks() ? std::min(period_, kMarkPause) : period_;
    if (wake_.wait_for(lock, pause, [&] { return ended_; })) return;
  }
}

FailureBoard::Watch::Watch(FailureBoard& board, std::function<void()> abort) : board_(board) {
  const std::lock_guard<std::mutex> lock(board.mutex_);
  entry_ = board.watched_.insert(board.watched_.end(), std::move(abort));
}

FailureBoard::Watch::~Watch() {
  const std::lock_guard<std::mutex> lock(board_.mutex_);
  board_.watched_.erase(entry_);
}

}  // namespace lockstep
