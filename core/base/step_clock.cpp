#include "lockstep/core/step_clock.h"

#include <utility>

#include <c10/core/impl/VirtualGuardImpl.h>

namespace lockstep {

void StepClock::begin(bool follows) {
  abandon();
  if (device_.is_cpu()) {
    if (!follows) since_ = HostClock::now();
  } else {
    open_.marks.push_back({follows && last_end_ ? last_end_ : record(), StepPart::other});
  }
  thread_ = std::this_thread::get_id();
}

void StepClock::end() {
  if (thread_.load() == std::thread::id()) return;
  mark(StepPart::other);
  if (!device_.is_cpu()) last_end_ = open_.marks.back().event;
  ended_.push_back(std::exchange(open_, {}));
  abandon();
}

void StepClock::abandon() {
  thread_ = std::thread::id();
  open_ = {};
  part_ = StepPart::other;
  around_.clear();
}

void StepClock::reset() {
  abandon();
  ended_.clear();
  last_end_ = nullptr;
}

StepTimes StepClock::take() {
  Step step = std::move(ended_.front());
  ended_.pop_front();
  double before = 0;
  for (size_t i = 1; i < step.marks.size(); ++i) {
    const double ms = step.marks[0].event->elapsedTime(*step.marks[i].event);
    step.times[step.marks[i - 1].part] += ms - before;
    before = ms;
  }
  for (Mark& mark : step.marks)
    if (mark.event.use_count() == 1) free_.push_back(std::move(mark.event));
  return step.times;
}

bool StepClock::counts(bool on_device) const {
  const std::thread::id thread = thread_.load(std::memory_order_relaxed);
  if (thread == std::thread::id()) return false;
  return thread == std::this_thread::get_id() || (on_device && !device_.is_cpu());
}

void StepClock::enter(StepPart part) {
  around_.push_back(part_);
  mark(part);
}

void StepClock::leave() {
  if (around_.empty()) return;
  mark(around_.back());
  around_.pop_back();
}

void StepClock::mark(StepPart next) {
  if (device_.is_cpu()) {
    const auto now = HostClock::now();
    open_.times[part_] += std::chrono::duration<double, std::milli>(now - since_).count();
    since_ = now;
  } else {
    open_.marks.push_back({record(), next});
  }
  part_ = next;
}

std::shared_ptr<c10::Event> StepClock::record() {
  std::shared_ptr<c10::Event> event;
  if (free_.empty()) {
    event = std::make_shared<c10::Event>(device_.type(), c10::EventFlag::BACKEND_DEFAULT);
  } else {
    event = std::move(free_.back());
    free_.pop_back();
  }
  event->record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
  return event;
}

}  // namespace lockstep
