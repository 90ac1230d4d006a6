#include "lockstep/tests/support/device/nccl_work.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "lockstep/core/check.h"

namespace lockstep::testing {
namespace {

constexpr std::chrono::milliseconds kLookEvery{5};

c10::Stream current_stream_of(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

/// On a device with an error nothing ends any more; whoever waits for the device gets the error.
bool has_ended(const c10::Event& end) {
  try {
    return end.query();
  } catch (const std::exception&) {
    return true;
  }
}

}  // namespace

void NcclWork::Shelf::put(const std::vector<at::Tensor>& tensors) {
  const std::lock_guard<std::mutex> lock(mutex_);
  tensors_.insert(tensors_.end(), tensors.begin(), tensors.end());
}

void NcclWork::Shelf::clear() {
  std::vector<at::Tensor> gone;  // freed after the lock is released: a deleter may run
  const std::lock_guard<std::mutex> lock(mutex_);
  gone.swap(tensors_);
}

NcclWork::NcclWork(Spec spec, std::vector<at::Tensor> outputs)
    : Work(spec.rank, spec.type),
      spec_(std::move(spec)),
      outputs_(std::move(outputs)),
      end_(std::make_shared<c10::Event>(spec_.device.type())) {}

void NcclWork::record_end(const c10::Stream& stream) {
  end_->record(stream);
  const c10::StreamGuard on_stream(stream);
  future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                     std::vector<c10::Device>{spec_.device});
  future_->markCompleted(c10::IValue(outputs_));
}

c10::intrusive_ptr<c10d::Work> NcclWork::without_outputs() const {
  auto rest = c10::make_intrusive<NcclWork>(spec_, std::vector<at::Tensor>());
  rest->end_ = end_;
  rest->shelf_ = shelf_;
  rest->exception_ = exception();
  return rest;
}

bool NcclWork::isCompleted() {
  if (exception() != nullptr || end_->query()) return true;
  const std::string error = spec_.error();
  if (error.empty()) return false;
  const std::lock_guard<std::mutex> lock(mutex_);
  try {
    C10_THROW_ERROR(DistBackendError, error);  // as c10d's NCCL: what() has a stack trace
  } catch (const c10::Error&) {
    exception_ = std::current_exception();
  }
  return true;
}

bool NcclWork::isSuccess() const {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "c10d's NCCL works do not tell of success");
}

void NcclWork::synchronize() {
  end_->block(current_stream_of(spec_.device));
  shelf_->clear();
}

bool NcclWork::wait(std::chrono::milliseconds timeout) {
  synchronize();
  if (timeout == kNoTimeout) {
    if (spec_.blocks_host && !isCompleted()) current_stream_of(spec_.device).synchronize();
    return true;
  }
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  while (!isCompleted()) {
    if (std::chrono::steady_clock::now() >= deadline) {
      abort();
      C10_THROW_ERROR(DistBackendError, fmt::format("{} did not end within {} ms of blocking wait",
                                                    spec_.name, timeout.count()));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

NcclWatchdog::NcclWatchdog(std::function<void(const std::string&)> on_timeout)
    : on_timeout_(std::move(on_timeout)), thread_([this] { look_out(); }) {}

NcclWatchdog::~NcclWatchdog() {
  stop();
  thread_.join();
}

void NcclWatchdog::watch(const NcclWork& work) {
  std::vector<std::shared_ptr<NcclWork::Shelf>> ended;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ended.swap(to_clear_);
    under_way_.push_back({work.spec(), work.end(), work.shelf(), std::chrono::steady_clock::now()});
  }
  for (const auto& shelf : ended) shelf->clear();
}

bool NcclWatchdog::idle() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return under_way_.empty();
}

void NcclWatchdog::stop() {
  const std::lock_guard<std::mutex> lock(mutex_);
  stopped_ = true;
  changed_.notify_all();
}

void NcclWatchdog::look_out() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stopped_) {
    const std::vector<std::string> overdue = look();
    lock.unlock();
    for (const std::string& message : overdue) on_timeout_(message);
    lock.lock();
    changed_.wait_for(lock, kLookEvery, [&] { return stopped_; });
  }
}

std::vector<std::string> NcclWatchdog::look() {
  std::vector<std::string> overdue;
  const auto now = std::chrono::steady_clock::now();
  for (auto work = under_way_.begin(); work != under_way_.end();) {
    if (has_ended(*work->end)) {
      to_clear_.push_back(std::move(work->shelf));
      work = under_way_.erase(work);
      continue;
    }
    const auto ran = std::chrono::duration_cast<std::chrono::milliseconds>(now - work->launched);
    if (ran >= work->spec.timeout && !work->reported) {
      work->reported = true;
      overdue.push_back(fmt::format("NCCL's watchdog: {}, has run for {} ms, timeout {} ms",
                                    work->spec.name, ran.count(), work->spec.timeout.count()));
    }
    ++work;
  }
  return overdue;
}

}  // namespace lockstep::testing
