#include "lockstep/parallel_state/failure_board.h"

namespace lockstep {
namespace {

constexpr char kKey[] = "failure";

std::string note_key(const std::string& key) { return "note/" + key; }

}  // namespace

FailureBoard::FailureBoard(c10::intrusive_ptr<c10d::Store> store, int64_t rank)
    : store_(std::move(store)), rank_(rank) {}

FailureBoard::~FailureBoard() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ended_ = true;
  }
  wake_.notify_all();
  if (lookout_.joinable()) lookout_.join();
}

void FailureBoard::post(const std::string& message) const noexcept {
  if (!store_) return;
  posted_ = true;
  try {
    store_->compareSet(kKey, "", "rank " + std::to_string(rank_) + ": " + message);
  } catch (const std::exception&) {
    // The store is gone with the process that served it; the peers see their connections close.
  }
}

std::optional<std::string> FailureBoard::find() const noexcept {
  if (!store_) return std::nullopt;
  try {
    if (!store_->check({kKey})) return std::nullopt;
    std::string message = store_->get_to_str(kKey);
    const bool own = message.starts_with("rank " + std::to_string(rank_) + ": ");
    return own ? std::nullopt : std::optional<std::string>(std::move(message));
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

void FailureBoard::write_note(const std::string& key, const std::string& text) const noexcept {
  if (!store_) return;
  try {
    store_->set(note_key(key), text);
  } catch (const std::exception&) {
    // As in post().
  }
}

std::optional<std::string> FailureBoard::read_note(const std::string& key) const noexcept {
  if (!store_) return std::nullopt;
  try {
    if (!store_->check({note_key(key)})) return std::nullopt;
    return store_->get_to_str(note_key(key));
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

void FailureBoard::look_out() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!wake_.wait_for(lock, kPatience, [&] { return ended_; })) {
    if (watched_.empty()) continue;
    lock.unlock();
    const bool failed = posted_ || find().has_value();
    lock.lock();
    if (!failed) continue;
    for (std::function<void()>& abort : watched_)
      if (abort) std::exchange(abort, nullptr)();
  }
}

FailureBoard::Watch::Watch(FailureBoard& board, std::function<void()> abort) : board_(board) {
  const std::lock_guard<std::mutex> lock(board.mutex_);
  entry_ = board.watched_.insert(board.watched_.end(), std::move(abort));
  if (!board.store_) return;
  if (!board.lookout_.joinable()) board.lookout_ = std::thread([&board] { board.look_out(); });
}

FailureBoard::Watch::~Watch() {
  const std::lock_guard<std::mutex> lock(board_.mutex_);
  board_.watched_.erase(entry_);
}

}  // namespace lockstep
