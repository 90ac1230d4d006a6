#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string_view>

#include <c10/core/Stream.h>

/// Streams and events of the lagging device. Each stream runs its tasks in order on a thread of its
/// own, which starts with the first task and ends when there has been none for a while.
namespace lockstep::testing {

/// Queues `task` behind what the stream has to do, as a launch: counted, with a random delay, and
/// left out once the device has an error. An exception becomes the device's error, after `what`. A
/// task must not keep device memory alive: a kernel has pointers only. In a capture it is recorded,
/// and runs in every replay.
void enqueue(const c10::Stream& stream, std::string_view what, std::function<void()> task);

/// A part of a launch that is counted elsewhere, and not recorded: enqueue() without them.
void enqueue_part(const c10::Stream& stream, std::string_view what, std::function<void()> task);

/// Queues what is no kernel: not counted, not delayed, not recorded, and done even after an error.
/// `task` does not throw.
void enqueue_bookkeeping(const c10::Stream& stream, std::function<void()> task);

/// Of this thread. A thread begins with device 0 and the default stream of each device.
c10::DeviceIndex current_device();
/// UsageError: no such device.
void set_current_device(c10::DeviceIndex device);
c10::Stream current_stream(c10::DeviceIndex device);
/// Makes `stream` its device's current one and returns the one before.
c10::Stream exchange_current_stream(const c10::Stream& stream);

c10::Stream default_stream(c10::DeviceIndex device);
/// One that nobody else has.
c10::Stream new_stream(c10::DeviceIndex device);
/// One of 32 of the device, in turn, as CUDA's pool.
c10::Stream pooled_stream(c10::DeviceIndex device);

/// Whether everything queued so far is done.
bool is_idle(const c10::Stream& stream);
/// The host waits for all that is queued on the stream so far. Counted under `cause`; throws the
/// device's error.
void wait_for_stream(const c10::Stream& stream, std::string_view cause);
/// The same for all streams of the device.
void wait_for_device(c10::DeviceIndex device, std::string_view cause);
/// Without a count and without errors: until no stream of any device has anything to do.
void wait_for_all_streams();

class GraphCapture;

/// A place in a stream. Copies are the same place.
class DeviceEvent {
 public:
  using Clock = std::chrono::steady_clock;

  /// Behind what the stream has to do now.
  static DeviceEvent record(const c10::Stream& stream);

  /// `stream` does nothing further until this place is reached. In a capture it is recorded; see
  /// GraphCapture for what is refused.
  void block(const c10::Stream& stream) const;
  /// What `stream` really does waits, not what a capture records there.
  void block_uncaptured(const c10::Stream& stream) const;
  bool reached() const;
  /// The host waits. Counted as "synchronize event"; throws the error of the event's device.
  void synchronize() const;
  /// Nothing while it is not reached.
  std::optional<Clock::time_point> time() const;

 private:
  struct State;
  static DeviceEvent record_in(const std::shared_ptr<GraphCapture>& capture,
                               const c10::Stream& stream);
  explicit DeviceEvent(std::shared_ptr<State> state) : state_(std::move(state)) {}

  std::shared_ptr<State> state_;
};

}  // namespace lockstep::testing
