#pragma once

// Internal.

#include <atomic>
#include <chrono>
#include <deque>
#include <memory>
#include <thread>
#include <vector>

#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include "lockstep/core/step_parts.h"

namespace lockstep {

/// Measures the times of a rank's training steps by part. A moment counts towards the innermost
/// InPart that is open, or towards StepPart::other.
///
/// On the CPU it reads the host's clock on the thread that called begin(); what other threads do
/// does not count. On another device it records events in the current stream, so that times are the
/// device's own and nobody waits for them; an idle device counts towards the part in which the host
/// keeps it waiting. A change of part costs two readings of the clock, or two events. While no step
/// is open, nothing is measured and nothing allocated.
class StepClock {
 public:
  explicit StepClock(c10::Device device) : device_(device) {}
  StepClock(const StepClock&) = delete;
  StepClock& operator=(const StepClock&) = delete;

  /// Opens a step; one that is open is dropped. `follows`: the step begins where the last one
  /// ended, so that no time is lost between the two.
  void begin(bool follows = false);
  /// Closes the open step. Nothing happens if none is open.
  void end();
  /// Drops the open step.
  void abandon();
  /// Drops the open step and those that were not taken.
  void reset();

  /// The times of the oldest step that has ended and was not taken. There must be one; on a device,
  /// the device must have reached the step's end.
  StepTimes take();
  bool has_ended_step() const { return !ended_.empty(); }

 private:
  friend class InPart;
  using HostClock = std::chrono::steady_clock;

  struct Mark {
    std::shared_ptr<c10::Event> event;
    StepPart part;  ///< that begins there
  };
  struct Step {
    StepTimes times = {};          ///< on the CPU
    std::vector<Mark> marks = {};  ///< on a device
  };

  /// Whether the open step, if there is one, counts what this thread does.
  bool counts(bool on_device) const;
  void enter(StepPart part);
  void leave();
  void mark(StepPart next);
  std::shared_ptr<c10::Event> record();

  c10::Device device_;
  std::atomic<std::thread::id> thread_ = {};  ///< of the open step; none while there is none
  Step open_;
  StepPart part_ = StepPart::other;  ///< now
  std::vector<StepPart> around_;     ///< the parts that enclose it, outermost first
  HostClock::time_point since_;
  std::deque<Step> ended_;
  std::shared_ptr<c10::Event> last_end_;
  std::vector<std::shared_ptr<c10::Event>> free_;  ///< events to be recorded again
};

/// Its lifetime counts towards `part`, except for that of an InPart inside it.
class InPart {
 public:
  /// `clock` may be null. `on_device`: the caller launches work of the clock's device, perhaps on a
  /// thread of autograd while the thread of the step waits for it.
  InPart(StepClock* clock, StepPart part, bool on_device = false)
      : clock_(clock && clock->counts(on_device) ? clock : nullptr) {
    if (clock_) clock_->enter(part);
  }
  ~InPart() {
    if (clock_) clock_->leave();
  }
  InPart(const InPart&) = delete;
  InPart& operator=(const InPart&) = delete;

 private:
  StepClock* clock_;
};

}  // namespace lockstep
