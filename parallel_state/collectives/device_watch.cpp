#include "lockstep/parallel_state/device_watch.h"

#include <algorithm>
#include <chrono>
#include <system_error>

#include <c10/core/impl/VirtualGuardImpl.h>

#include "lockstep/core/check.h"
#include "lockstep/parallel_state/failure_reason.h"
#include "lockstep/parallel_state/operation.h"
#include "lockstep/parallel_state/recorded_calls.h"

namespace lockstep {
namespace {

constexpr std::chrono::milliseconds kLookInterval{100}, kEndInterval{5};

/// Why one of the parts has failed; nothing if none has.
std::optional<std::string> failure_of(const Work::Operation& operation) {
  for (const auto& part : operation.parts)
    if (const auto failure = part->failure()) return failure;
  return std::nullopt;
}

bool has_ended(const Work::Operation& operation) {
  return std::all_of(operation.parts.begin(), operation.parts.end(),
                     [](const auto& part) { return part->is_completed(); });
}

struct Progress {
  bool ended = false;
  std::optional<std::string> failure;
};

/// After an error of the device, such as an illegal address, asking throws.
Progress progress_of(const Work::Operation& operation) {
  try {
    const bool ended = has_ended(operation);  // asked first: NCCL's works learn of failures then
    return {ended, failure_of(operation)};
  } catch (const std::exception& error) {
    return {false, reason_of(error)};
  }
}

/// Otherwise what this thread destroys, such as events, would make a context on the first device.
void stay_on(c10::Device device) {
  try {
    c10::impl::VirtualGuardImpl(device.type()).setDevice(device);
  } catch (const std::exception&) {
    // An error of the device, which look() will meet again.
  }
}

}  // namespace

DeviceWatch::DeviceWatch(std::shared_ptr<FailureBoard> failures, c10::Device device)
    : failures_(std::move(failures)), device_(device) {}

DeviceWatch::~DeviceWatch() { finish(); }

void DeviceWatch::include(const std::shared_ptr<Communicator>& communicator) {
  const std::lock_guard<std::mutex> lock(mutex_);
  communicators_.push_back(communicator);
}

void DeviceWatch::begin(std::shared_ptr<Work::Operation> operation) {
  const std::lock_guard<std::mutex> lock(mutex_);
  watch(starting_, std::move(operation));
}

void DeviceWatch::add(std::shared_ptr<Work::Operation> operation) {
  const std::lock_guard<std::mutex> lock(mutex_);
  drop_start(*operation);
  if (!recording_) watch(under_way_, std::move(operation));
}

void DeviceWatch::forget(const Work::Operation& operation) {
  const std::lock_guard<std::mutex> lock(mutex_);
  drop_start(operation);
  if (!error_.empty()) throw CommunicationError(error_);
}

void DeviceWatch::watch(Operations& operations, std::shared_ptr<Work::Operation> operation) {
  if (ending_) return;
  operations.push_back(std::move(operation));
  if (!thread_.joinable()) thread_ = std::thread([this] { look_out(); });
  changed_.notify_all();
}

void DeviceWatch::start_recording(std::shared_ptr<RecordedCalls> calls) {
  const std::lock_guard<std::mutex> lock(mutex_);
  recording_ = std::move(calls);
}

void DeviceWatch::stop_recording() {
  const std::lock_guard<std::mutex> lock(mutex_);
  recording_.reset();
}

bool DeviceWatch::is_recording() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return recording_ != nullptr;
}

void DeviceWatch::record(const RecordedCall& call) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (recording_) recording_->push_back(call);
}

void DeviceWatch::drop_start(const Work::Operation& operation) {
  starting_.remove_if([&](const auto& started) { return started.get() == &operation; });
}

void DeviceWatch::check() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!error_.empty()) throw CommunicationError(error_);
}

void DeviceWatch::finish() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ending_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
  if (failures_->has_failed()) abort_communicators();
  under_way_.clear();
}

void DeviceWatch::look_out() {
  stay_on(device_);
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return ending_ || !idle(); });
    if (idle() || !error_.empty() || (ending_ && failures_->has_failed())) return;
    lock.unlock();
    const auto [failed, reason] = look();
    if (failed) fail(*failed, reason);
    lock.lock();
    changed_.wait_for(lock, ending_ ? kEndInterval : kLookInterval,
                      [&, before = ending_] { return ending_ != before; });
  }
}

std::pair<std::shared_ptr<Work::Operation>, std::string> DeviceWatch::look() {
  Operations starting, taken;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    starting = starting_;
    taken.swap(under_way_);
  }
  std::shared_ptr<Work::Operation> failed;
  std::string reason;
  const auto posted = failures_->find();
  const auto now = std::chrono::steady_clock::now();
  const auto judge = [&](const std::shared_ptr<Work::Operation>& operation,
                         const std::optional<std::string>& failure) {
    const bool late = now - operation->start > operation->group->timeout;
    if (!failure && !late && !posted) return;
    failed = operation;
    reason = failure ? *failure : late ? "timed out" : posted->text();
  };
  for (const auto& operation : starting)
    if (!failed) judge(operation, std::nullopt);
  taken.remove_if([&](const std::shared_ptr<Work::Operation>& operation) {
    if (failed) return false;
    const Progress progress = progress_of(*operation);
    if (!progress.failure && progress.ended) return true;
    judge(operation, progress.failure);
    return false;
  });
  const std::lock_guard<std::mutex> lock(mutex_);
  under_way_.splice(under_way_.begin(), taken);
  return {failed, reason};
}

void DeviceWatch::fail(const Work::Operation& operation, const std::string& reason) {
  std::string text = reason;
  try {
    fail_operation(operation, reason);
  } catch (const std::exception& error) {
    text = error.what();
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    error_ = text;
  }
  abort_communicators();
}

void DeviceWatch::abort_communicators() {
  std::vector<std::weak_ptr<Communicator>> communicators;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    communicators = communicators_;
  }
  std::vector<std::thread> threads;
  threads.reserve(communicators.size());
  for (const auto& communicator : communicators) {
    const auto alive = communicator.lock();
    if (!alive) continue;
    try {
      threads.emplace_back([alive, device = device_] {
        stay_on(device);
        alive->abort();
      });
    } catch (const std::system_error&) {  // no thread can be started
      alive->abort();
    }
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace lockstep
