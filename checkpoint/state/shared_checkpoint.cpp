#include "lockstep/checkpoint/shared_checkpoint.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "lockstep/checkpoint/checkpoint_folder.h"
#include "lockstep/core/check.h"
#include "lockstep/parallel_state/collectives.h"

namespace lockstep {
namespace {

constexpr std::string_view kFound = "found ";
constexpr std::string_view kRefused = "refused: ";
constexpr const char* kGone = "removed";
constexpr const char* kAsBefore = "as before";

/// " rank 1 found none;", " ranks 1, 2 found none;"
std::string found_by(const std::vector<size_t>& ranks, const char* what) {
  if (ranks.empty()) return "";
  return fmt::format(" rank{} {} found {};", ranks.size() == 1 ? "" : "s", fmt::join(ranks, ", "),
                     what);
}

}  // namespace

std::string as_rank_0_finds(const ParallelState& state, const std::function<std::string()>& find,
                            std::string_view label) {
  std::string word;
  try {
    if (state.rank() == 0) word = std::string(kFound) + find();
  } catch (const FileError& error) {
    word = error.what();
  }
  word = all_gather_texts(state.world(), word, label).front();
  require<FileError>(word.starts_with(kFound), "{}", word);
  return word.substr(kFound.size());
}

SharedCheckpoint::SharedCheckpoint(std::string path, const ParallelState& state)
    : path_(std::move(path)), state_(state) {}

bool SharedCheckpoint::read(const std::function<void(CheckpointReader&)>& use) {
  std::string status = kGone;
  std::exception_ptr failure;
  try {
    if (!reader_) reader_.emplace(path_);
    use(*reader_);
    status = fmt::format("{:08x}", reader_->checksum());
  } catch (const FileError& error) {
    if (!is_gone()) {
      failure = std::current_exception();
      status = std::string(kRefused) + error.what();
    }
  }
  const auto all = all_gather_texts(state_.world(), status, "checkpoint that is read");
  if (failure) std::rethrow_exception(failure);
  for (size_t rank = 0; rank < all.size(); ++rank)
    if (all[rank].starts_with(kRefused))
      fail<FileError>("rank {}: {}", rank, all[rank].substr(kRefused.size()));
  if (status != kGone && std::count(all.begin(), all.end(), status) == state_.world_size())
    return true;
  check_same_for_all(all);
  return false;
}

/// False also if that cannot be determined.
bool SharedCheckpoint::is_gone() const {
  try {
    return reader_ ? !reader_->is_unchanged() : !is_checkpoint(path_);
  } catch (const FileError&) {
    return false;
  }
}

/// All ranks throw if rank 0 has seen a checkpoint, others have not, and all of them still see what
/// they have `seen`: then another try would not help.
void SharedCheckpoint::check_same_for_all(const std::vector<std::string>& seen) const {
  const bool as_before = reader_ ? !is_gone() : is_gone();
  const auto all = all_gather_texts(state_.world(), as_before ? kAsBefore : "", "checkpoint again");
  if (seen.front() == kGone || std::count(all.begin(), all.end(), kAsBefore) < state_.world_size())
    return;
  std::vector<size_t> none, another;
  for (size_t rank = 0; rank < seen.size(); ++rank)
    if (seen[rank] != seen.front()) (seen[rank] == kGone ? none : another).push_back(rank);
  fail<FileError>(
      "checkpoint '{}': rank 0 found it;{}{} allowed: a path under which all ranks see the same "
      "checkpoint",
      path_, found_by(none, "none"), found_by(another, "another one"));
}

}  // namespace lockstep
