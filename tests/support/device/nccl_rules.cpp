#include "lockstep/tests/support/device/nccl_rules.h"

namespace lockstep::testing {

NcclCounts NcclRules::counts(int64_t rank) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = counts_.find(rank);
  return found == counts_.end() ? NcclCounts() : found->second;
}

std::vector<std::string> NcclRules::blocked_hosts() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::string> result;
  for (const auto& [rank, places] : blocked_)
    result.insert(result.end(), places.begin(), places.end());
  return result;
}

void NcclRules::abort_all() {
  const std::lock_guard<std::mutex> lock(backends_mutex_);
  for (const auto& [backend, abort] : backends_) abort();
}

void NcclRules::report_errors(const std::string& text) {
  const std::lock_guard<std::mutex> lock(mutex_);
  error_ = text;
}

std::string NcclRules::error() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return error_;
}

void NcclRules::note(int64_t rank, const std::function<void(NcclCounts&)>& change) {
  const std::lock_guard<std::mutex> lock(mutex_);
  change(counts_[rank]);
}

void NcclRules::enter(const void* backend, std::function<void()> abort) {
  const std::lock_guard<std::mutex> lock(backends_mutex_);
  backends_[backend] = std::move(abort);
}

void NcclRules::leave(const void* backend) {
  const std::lock_guard<std::mutex> lock(backends_mutex_);
  backends_.erase(backend);
}

NcclRules::OnDevice::OnDevice(NcclRules& rules, int64_t rank) : rules_(rules), rank_(rank) {
  const std::lock_guard<std::mutex> lock(rules_.mutex_);
  ++rules_.on_device_[rank_];
}

NcclRules::OnDevice::~OnDevice() {
  const std::lock_guard<std::mutex> lock(rules_.mutex_);
  --rules_.on_device_[rank_];
  rules_.kernel_ended_.notify_all();
}

void NcclRules::await_device(int64_t rank) {
  std::unique_lock<std::mutex> lock(mutex_);
  kernel_ended_.wait(lock, [&] { return on_device_[rank] == 0; });
}

NcclRules::HostBlock::HostBlock(NcclRules& rules, int64_t rank, const std::string& where)
    : rules_(rules), rank_(rank) {
  const std::lock_guard<std::mutex> lock(rules_.mutex_);
  rules_.blocked_[rank_].push_back(where);
  ++rules_.counts_[rank_].host_blocks;
}

NcclRules::HostBlock::~HostBlock() {
  const std::lock_guard<std::mutex> lock(rules_.mutex_);
  rules_.blocked_[rank_].pop_back();
}

}  // namespace lockstep::testing
