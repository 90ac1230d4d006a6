#include "lockstep/parallel_state/failure_board.h"

namespace lockstep {
namespace {

constexpr char kKey[] = "failure";

}  // namespace

FailureBoard::FailureBoard(c10::intrusive_ptr<c10d::Store> store, int64_t rank)
    : store_(std::move(store)), rank_(rank) {}

void FailureBoard::post(const std::string& message) const noexcept {
  if (!store_) return;
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

}  // namespace lockstep
