#include <algorithm>
#include <thread>

#include "lockstep/core/check.h"
#include "lockstep/tests/support/device/device_streams.h"
#include "lockstep/tests/support/device/graph_capture.h"
#include "lockstep/tests/support/device/nccl_launches.h"

// How a rank gets its communicators, and how they end.

namespace lockstep::testing {

void NcclLaunches::connect_eagerly() {
  group_communicator();
  eager_ = true;
}

NcclLaunches::Member NcclLaunches::group_communicator() {
  return communicator("group", spec_.ranks);
}

NcclLaunches::Member NcclLaunches::pair_communicator(int peer) {
  const auto [low, high] = std::minmax(spec_.rank, peer);
  return communicator(fmt::format("{}:{}", low, high), {spec_.ranks[static_cast<size_t>(low)],
                                                        spec_.ranks[static_cast<size_t>(high)]});
}

NcclLaunches::Member NcclLaunches::communicator(const std::string& key,
                                                const std::vector<int64_t>& ranks) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    check_running();
    const auto known = members_.find(key);
    if (known != members_.end()) return known->second;
  }
  return make_communicator(key, ranks);
}

NcclLaunches::Member NcclLaunches::make_communicator(const std::string& key,
                                                     const std::vector<int64_t>& ranks) {
  const std::string where = described(fmt::format("communicator of ranks {}", ranks));
  refuse_in_capture(current_stream(device_.index()), where);
  const NcclRules::HostBlock block(*rules_, global_rank_, where);
  const auto rank =
      static_cast<int>(std::find(ranks.begin(), ranks.end(), global_rank_) - ranks.begin());
  const Member member{meet(key, static_cast<int>(ranks.size()), rank == 0), ranks, rank,
                      new_stream(device_.index())};
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    check_running();
    joining_.emplace(key, member);
  }
  if (!member.communicator->join(rank)) fail_aborted();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    joining_.erase(key);
    check_running();
    members_.emplace(key, member);
  }
  rules_->note(global_rank_, [](NcclCounts& counts) { ++counts.communicators; });
  return member;
}

/// The first member creates the communicator and puts its id into the group's store.
std::shared_ptr<NcclCommunicator> NcclLaunches::meet(const std::string& key, int size, bool leads) {
  if (leads) {
    int64_t id = 0;
    auto made = NcclCommunicator::make(size, &id);
    const std::string text = std::to_string(id);
    store_->set(key, std::vector<uint8_t>(text.begin(), text.end()));
    return made;
  }
  auto found = NcclCommunicator::find(await_id(key));
  TORCH_CHECK_WITH(DistBackendError, found, described("communicator "), key,
                   ": its first member has gone");
  return found;
}

int64_t NcclLaunches::await_id(const std::string& key) {
  const auto deadline = std::chrono::steady_clock::now() + timeout_;
  while (!store_->check({key})) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (released_) fail_aborted();
    }
    TORCH_CHECK_WITH(DistBackendError, std::chrono::steady_clock::now() < deadline,
                     described("communicator "), key, ": no unique id in the store within ",
                     timeout_.count(), " ms; its first member has not come");
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  const std::vector<uint8_t> text = store_->get(key);
  return std::stoll(std::string(text.begin(), text.end()));
}

void NcclLaunches::check_running() const {
  if (state_ == State::aborted) fail_aborted();
  TORCH_CHECK_WITH(DistBackendError, state_ == State::running, described("communicators"),
                   " have been shut down");
}

void NcclLaunches::fail_aborted() const {
  C10_THROW_ERROR(DistBackendError, described("communicators have been aborted"));
}

void NcclLaunches::shutdown() {
  const auto ended = [this] {
    const std::lock_guard<std::mutex> lock(mutex_);
    return state_ != State::running;
  };
  while (!ended() && !watchdog_.idle()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  if (ended()) return;
  TORCH_CHECK_WITH(DistBackendError, graph_references_.use_count() == 1, described("shutdown"),
                   ": graphs that replay its collectives live; NCCL waits until all are gone");
  const std::lock_guard<std::mutex> lock(mutex_);
  state_ = State::shut_down;
  watchdog_.stop();
}

void NcclLaunches::release() {
  release_kernels();
  const std::lock_guard<std::mutex> lock(mutex_);
  released_ = true;
  for (const auto& [key, member] : joining_) member.communicator->abort(member.rank);
}

void NcclLaunches::abort() {
  release_kernels();
  rules_->await_device(global_rank_);
  while (graph_references_.use_count() > 1)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

void NcclLaunches::release_kernels() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (state_ != State::running) return;
  state_ = State::aborted;
  for (const auto& [key, member] : members_) member.communicator->abort(member.rank);
  watchdog_.stop();
}

}  // namespace lockstep::testing
