#include "lockstep/distributed/read_watch.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/record_function.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include "lockstep/core/check.h"

namespace lockstep {
namespace {

using c10::DebugInfoKind;
using c10::ThreadLocalDebugInfo;

std::unique_ptr<at::ObserverContext> on_operator(const at::RecordFunction& call);

/// The watches of one thread. libtorch's callbacks are plain functions of a thread. What libtorch
/// calls debug information is passed on to the threads on which autograd runs a backward. Several
/// of them run at once: the nodes of CPU tensors run on the thread that called backward, those of
/// device tensors on a thread of the device.
class ThreadWatches final : public c10::DebugInfoBase {
 public:
  /// null if neither this thread has watches nor the thread whose backward it runs.
  static ThreadWatches* current() {
    return dynamic_cast<ThreadWatches*>(ThreadLocalDebugInfo::get(kKind));
  }

  static ThreadWatches& of_this_thread() {
    if (ThreadWatches* const found = current()) return *found;
    // Goes below what is there, because libtorch removes only the topmost one.
    std::vector<Information> above;
    while (ThreadLocalDebugInfo::current()) above.push_back(pop());
    const auto watches = std::make_shared<ThreadWatches>();
    ThreadLocalDebugInfo::_push(kKind, watches);
    for (; !above.empty(); above.pop_back())
      ThreadLocalDebugInfo::_push(above.back().first, above.back().second);
    return *watches;
  }

  void add(std::shared_ptr<ReadWatch::Slot> slot) {
    const std::lock_guard lock(mutex_);
    slots_.push_back({std::move(slot)});
    if (handle_ == at::INVALID_CALLBACK_HANDLE)
      handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback(lockstep::on_operator)
                                               .needsInputs(true)
                                               .scopes({at::RecordScope::FUNCTION}));
  }

  bool holds(const std::shared_ptr<ReadWatch::Slot>& slot) {
    const std::lock_guard lock(mutex_);
    return std::any_of(slots_.begin(), slots_.end(),
                       [&](const Watched& one) { return one.slot == slot; });
  }

  void on_call(c10::ArrayRef<const c10::IValue> inputs) {
    if (busy_ == std::this_thread::get_id()) return;  // an observer's own operator
    const std::lock_guard lock(mutex_);
    busy_ = std::this_thread::get_id();
    for (const c10::IValue& input : inputs) visit(input);
    for (size_t i = 0; i < slots_.size(); ++i)
      if (std::exchange(slots_[i].read, false))
        if (ReadObserver* const observer = slots_[i].slot->observer.load()) observer->on_operator();
    busy_ = std::thread::id();
    if (std::this_thread::get_id() == thread_) drop_stopped();
  }

 private:
  using Information = std::pair<DebugInfoKind, std::shared_ptr<c10::DebugInfoBase>>;
  /// A kind that libtorch itself never sets; a backward inside a backward sets PRODUCER_INFO.
  static constexpr DebugInfoKind kKind = DebugInfoKind::TEST_INFO_2;

  struct Watched {
    std::shared_ptr<ReadWatch::Slot> slot;
    bool read = false;  ///< by the operator that is about to run
  };

  /// Removes the topmost one.
  static Information pop() {
    for (const DebugInfoKind kind :
         {DebugInfoKind::PRODUCER_INFO, DebugInfoKind::MOBILE_RUNTIME_INFO,
          DebugInfoKind::PROFILER_STATE, DebugInfoKind::INFERENCE_CONTEXT,
          DebugInfoKind::PARAM_COMMS_INFO, DebugInfoKind::TEST_INFO}) {
      try {
        return {kind, ThreadLocalDebugInfo::_pop(kind)};
      } catch (const c10::Error&) {  // another one is above it
      }
    }
    fail<UsageError>("the thread has debug information of an unknown kind");
  }

  void visit(const c10::IValue& value) {
    if (value.isTensor())
      tell(value.toTensor());
    else if (value.isList())
      for (const c10::IValue& item : value.toListRef()) visit(item);
  }

  void tell(const at::Tensor& tensor) {
    for (size_t i = 0; i < slots_.size(); ++i)
      if (ReadObserver* const observer = slots_[i].slot->observer.load())
        if (observer->on_read(tensor)) slots_[i].read = true;
  }

  void drop_stopped() {
    std::erase_if(slots_, [](const auto& one) { return one.slot->observer.load() == nullptr; });
    if (!slots_.empty() || handle_ == at::INVALID_CALLBACK_HANDLE) return;
    at::removeCallback(handle_);
    handle_ = at::INVALID_CALLBACK_HANDLE;
  }

  std::thread::id thread_ = std::this_thread::get_id();
  std::recursive_mutex mutex_;  ///< guards all of the following except busy_
  std::vector<Watched> slots_;
  std::atomic<std::thread::id> busy_;  ///< the thread that tells the observers
  at::CallbackHandle handle_ = at::INVALID_CALLBACK_HANDLE;
};

std::unique_ptr<at::ObserverContext> on_operator(const at::RecordFunction& call) {
  if (ThreadWatches* const watches = ThreadWatches::current()) watches->on_call(call.inputs());
  return nullptr;
}

}  // namespace

void ReadWatch::start(ReadObserver& observer) {
  stop();
  slot_ = std::make_shared<Slot>();
  slot_->observer = &observer;
  ThreadWatches::of_this_thread().add(slot_);
}

void ReadWatch::stop() {
  if (slot_) slot_->observer = nullptr;
  slot_.reset();
}

bool ReadWatch::is_on_this_thread() const {
  ThreadWatches* const watches = ThreadWatches::current();
  return slot_ && watches && watches->holds(slot_);
}

}  // namespace lockstep
