#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string_view>

#include <c10/core/Stream.h>

/// Streams and events of the lagging device. Each stream runs its tasks in order on its own thread,
/// which starts with the first task and ends after a while without tasks.
namespace lockstep::testing {

/// Queues `task` as a launch, after the work that the stream has: it is counted, randomly delayed,
/// and skipped once the device has an error. An exception becomes the device's error, prefixed with
/// `what`. Like a kernel, which only has pointers, a task must not keep device memory alive. In a
/// capture, the task is recorded and runs in every replay.
void enqueue(const c10::Stream& stream, std::string_view what, std::function<void()> task);

/// Queues a part of a launch that is counted elsewhere: like enqueue(), but neither counted nor
/// recorded.
void enqueue_part(const c10::Stream& stream, std::string_view what, std::function<void()> task);

/// Queues a task that is not a kernel: not counted, not delayed, not recorded, and run even after
/// an error. `task` does not throw.
void enqueue_bookkeeping(const c10::Stream& stream, std::function<void()> task);

/// The current device of this thread. A thread starts with device 0 and each device's default
/// stream.
c10::DeviceIndex current_device();
/// Throws UsageError if there is no such device.
void set_current_device(c10::DeviceIndex device);
c10::Stream current_stream(c10::DeviceIndex device);
/// Makes `stream` its device's current one and returns the previous one.
c10::Stream exchange_current_stream(const c10::Stream& stream);

c10::Stream default_stream(c10::DeviceIndex device);
/// A stream that nobody else has.
c10::Stream new_stream(c10::DeviceIndex device);
/// One of 32 streams of the device, round-robin, like CUDA's pool.
c10::Stream pooled_stream(c10::DeviceIndex device);

/// Whether everything queued so far is done.
bool is_idle(const c10::Stream& stream);
/// The host waits for everything queued on the stream so far. Counted under `cause`; throws the
/// device's error.
void wait_for_stream(const c10::Stream& stream, std::string_view cause);
/// The same for all streams of the device.
void wait_for_device(c10::DeviceIndex device, std::string_view cause);
/// Waits until no stream of any device has work. Not counted; throws no errors.
void wait_for_all_streams();

class GraphCapture;

/// A position in a stream. Copies refer to the same position.
class DeviceEvent {
 public:
  using Clock = std::chrono::steady_clock;

  /// The position after everything that is queued on the stream now.
  static DeviceEvent record(const c10::Stream& stream);

  /// `stream` waits until this position is reached. In a capture the wait is recorded; see
  /// GraphCapture for what is refused.
  void block(const c10::Stream& stream) const;
  /// Always blocks the real `stream`, even during a capture, and records nothing.
  void block_uncaptured(const c10::Stream& stream) const;
  bool reached() const;
  /// The same for the host; throws the error of the event's device.
  bool query() const;
  /// The host waits. Counted as "synchronize event", or as "synchronize event elsewhere" if the
  /// thread's current device is another one, where CUDA makes a context. Throws the error of the
  /// event's device.
  void synchronize() const;
  /// Nullopt until it is reached.
  std::optional<Clock::time_point> time() const;

 private:
  struct State;
  static DeviceEvent record_in(const std::shared_ptr<GraphCapture>& capture,
                               const c10::Stream& stream);
  explicit DeviceEvent(std::shared_ptr<State> state) : state_(std::move(state)) {}

  std::shared_ptr<State> state_;
};

}  // namespace lockstep::testing
