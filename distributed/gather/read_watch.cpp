#include "lockstep/distributed/read_watch.h"

#include <vector>

#include <ATen/record_function.h>

namespace lockstep {
namespace {

std::unique_ptr<at::ObserverContext> on_operator(const at::RecordFunction& call);

/// The watches of one thread. libtorch's callbacks are plain functions of a thread, so their state
/// is the thread's too.
class ThreadWatches {
 public:
  void add(std::shared_ptr<ReadWatch::Slot> slot) {
    slots_.push_back(std::move(slot));
    if (handle_ == at::INVALID_CALLBACK_HANDLE)
      handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback(on_operator)
                                               .needsInputs(true)
                                               .scopes({at::RecordScope::FUNCTION}));
  }

  void tell(const at::Tensor& tensor) {
    for (size_t i = 0; i < slots_.size(); ++i)
      if (ReadObserver* const observer = slots_[i]->observer.load()) observer->on_read(tensor);
  }

  void visit(const c10::IValue& value) {
    if (value.isTensor())
      tell(value.toTensor());
    else if (value.isList())
      for (const c10::IValue& item : value.toListRef()) visit(item);
  }

  void drop_stopped() {
    std::erase_if(slots_, [](const auto& slot) { return slot->observer.load() == nullptr; });
    if (!slots_.empty() || handle_ == at::INVALID_CALLBACK_HANDLE) return;
    at::removeCallback(handle_);
    handle_ = at::INVALID_CALLBACK_HANDLE;
  }

 private:
  std::vector<std::shared_ptr<ReadWatch::Slot>> slots_;
  at::CallbackHandle handle_ = at::INVALID_CALLBACK_HANDLE;
};

thread_local ThreadWatches thread_watches;

std::unique_ptr<at::ObserverContext> on_operator(const at::RecordFunction& call) {
  for (const c10::IValue& input : call.inputs()) thread_watches.visit(input);
  thread_watches.drop_stopped();
  return nullptr;
}

}  // namespace

void ReadWatch::start(ReadObserver& observer) {
  stop();
  slot_ = std::make_shared<Slot>();
  slot_->observer = &observer;
  thread_watches.add(slot_);
}

void ReadWatch::stop() {
  if (slot_) slot_->observer = nullptr;
  slot_.reset();
}

}  // namespace lockstep
