#include "lockstep/tests/support/device/device_streams.h"

#include <array>
#include <cstdlib>
#include <vector>

#include "lockstep/core/check.h"
#include "lockstep/tests/support/device/device_state.h"
#include "lockstep/tests/support/device/graph_capture.h"
#include "lockstep/tests/support/device/stream_worker.h"

namespace lockstep::testing {
namespace {

constexpr c10::StreamId kPooledStreams = 32;  // ids 1 to 32; 0 is the default stream

/// The streams of a device: the default one, those of the pool, and new ones.
struct DeviceStreams {
  std::mutex mutex;
  std::vector<std::unique_ptr<StreamWorker>> workers;
  c10::StreamId next_pooled = 0;
};

// Never destroyed: threads may use it during process exit.
std::array<DeviceStreams, kMaxDevices>& all_streams() {
  static auto* const streams = new std::array<DeviceStreams, kMaxDevices>;
  return *streams;
}

thread_local c10::DeviceIndex this_device = 0;
thread_local std::array<c10::StreamId, kMaxDevices> this_stream = {};

void check_device(c10::DeviceIndex device) {
  require<UsageError>(device >= 0 && device < device_count(),
                      "lagging device: found index {}, allowed: 0 to {}", static_cast<int>(device),
                      static_cast<int>(device_count()) - 1);
}

c10::Stream stream_at(c10::DeviceIndex device, c10::StreamId id) {
  check_device(device);
  return c10::Stream(c10::Stream::UNSAFE, device_at(device), id);
}

/// Caller holds the lock of `streams`.
void grow_to(DeviceStreams& streams, c10::DeviceIndex device, size_t count) {
  while (streams.workers.size() < count)
    streams.workers.push_back(std::make_unique<StreamWorker>(
        stream_at(device, static_cast<c10::StreamId>(streams.workers.size()))));
}

StreamWorker& worker_of(const c10::Stream& stream) {
  check_device(stream.device_index());
  DeviceStreams& streams = all_streams()[static_cast<size_t>(stream.device_index())];
  const std::lock_guard<std::mutex> lock(streams.mutex);
  grow_to(streams, stream.device_index(), kPooledStreams + 1);
  return *streams.workers.at(static_cast<size_t>(stream.id()));
}

std::vector<StreamWorker*> workers_of(c10::DeviceIndex device) {
  DeviceStreams& streams = all_streams()[static_cast<size_t>(device)];
  const std::lock_guard<std::mutex> lock(streams.mutex);
  std::vector<StreamWorker*> workers;
  for (const auto& worker : streams.workers) workers.push_back(worker.get());
  return workers;
}

// libtorch's own statics are destroyed after this; a kernel that still ran would miss them.
void park_streams() {
  stop_streams();
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(2);
  for (c10::DeviceIndex device = 0; device < device_count(); ++device)
    for (StreamWorker* worker : workers_of(device)) worker->wait_parked(deadline);
}

}  // namespace

void enqueue(const c10::Stream& stream, std::string_view what, std::function<void()> task) {
  if (const auto capture = GraphCapture::of(stream)) {
    const std::string name(what);
    return capture->record(stream, name, [name, task = std::move(task)](const c10::Stream& other) {
      enqueue_part(other, name, task);
    });
  }
  if (loads_kernel(stream.device_index(), what))
    for (StreamWorker* worker : workers_of(stream.device_index())) worker->wait();
  count_launch(stream.device_index());
  enqueue_part(stream, what, std::move(task));
}

void enqueue_part(const c10::Stream& stream, std::string_view what, std::function<void()> task) {
  [[maybe_unused]] static const int parked_at_exit = std::atexit(&park_streams);
  worker_of(stream).push({std::string(what.empty() ? "a task" : what), std::move(task)});
}

void enqueue_bookkeeping(const c10::Stream& stream, std::function<void()> task) {
  worker_of(stream).push({"", std::move(task)});
}

c10::DeviceIndex current_device() { return this_device; }

void set_current_device(c10::DeviceIndex device) {
  check_device(device);
  this_device = device;
}

c10::Stream current_stream(c10::DeviceIndex device) {
  check_device(device);
  return stream_at(device, this_stream[static_cast<size_t>(device)]);
}

c10::Stream exchange_current_stream(const c10::Stream& stream) {
  const c10::Stream before = current_stream(stream.device_index());
  this_stream[static_cast<size_t>(stream.device_index())] = stream.id();
  return before;
}

c10::Stream default_stream(c10::DeviceIndex device) { return stream_at(device, 0); }

c10::Stream new_stream(c10::DeviceIndex device) {
  check_device(device);
  DeviceStreams& streams = all_streams()[static_cast<size_t>(device)];
  const std::lock_guard<std::mutex> lock(streams.mutex);
  const size_t id = std::max<size_t>(streams.workers.size(), kPooledStreams + 1);
  grow_to(streams, device, id + 1);
  return stream_at(device, static_cast<c10::StreamId>(id));
}

c10::Stream pooled_stream(c10::DeviceIndex device) {
  check_device(device);
  DeviceStreams& streams = all_streams()[static_cast<size_t>(device)];
  const std::lock_guard<std::mutex> lock(streams.mutex);
  return stream_at(device, 1 + streams.next_pooled++ % kPooledStreams);
}

bool is_idle(const c10::Stream& stream) {
  refuse_in_capture(stream, "query stream");
  return worker_of(stream).idle();
}

void wait_for_stream(const c10::Stream& stream, std::string_view cause) {
  refuse_in_capture(stream, std::string(cause));
  count_wait(stream.device_index(), cause);
  worker_of(stream).wait();
  throw_device_error(stream.device_index());
}

void wait_for_device(c10::DeviceIndex device, std::string_view cause) {
  check_device(device);
  if (const auto capture = GraphCapture::on(device)) capture->refuse(std::string(cause));
  count_wait(device, cause);
  for (StreamWorker* worker : workers_of(device)) worker->wait();
  throw_device_error(device);
}

void wait_for_all_streams() {
  for (bool idle = false; !idle && !streams_stopped();) {
    idle = true;
    for (c10::DeviceIndex device = 0; device < device_count(); ++device)
      for (StreamWorker* worker : workers_of(device)) {
        idle = idle && worker->idle();
        worker->wait();
      }
  }
}

struct DeviceEvent::State {
  explicit State(c10::DeviceIndex index) : device(index) {}

  void reach() {
    {
      const std::lock_guard<std::mutex> lock(mutex);
      time = Clock::now();
    }
    changed.notify_all();
  }
  void wait() {
    std::unique_lock<std::mutex> lock(mutex);
    while (!time && !streams_stopped()) changed.wait_for(lock, std::chrono::milliseconds(100));
  }

  void hurry() const { worker->hurry(place); }

  /// The host queries a captured event. Replays do not update it.
  void refuse_host(const std::string& what) const {
    if (capture) capture->refuse(what + " of a captured event");
  }

  const c10::DeviceIndex device;
  StreamWorker* worker = nullptr;
  int64_t place = 0;  ///< in the stream
  std::mutex mutex;
  std::condition_variable changed;
  std::optional<Clock::time_point> time;

  // For an event that was recorded in a capture:
  std::shared_ptr<GraphCapture> capture;
  GraphCapture::Place place_in_capture;
  std::optional<DeviceEvent> of_replay;  ///< event of the last replay
};

DeviceEvent DeviceEvent::record(const c10::Stream& stream) {
  if (const auto capture = GraphCapture::of(stream)) return record_in(capture, stream);
  const auto state = std::make_shared<State>(stream.device_index());
  state->worker = &worker_of(stream);
  state->place = state->worker->push({"", [state] { state->reach(); }});
  return DeviceEvent(state);
}

DeviceEvent DeviceEvent::record_in(const std::shared_ptr<GraphCapture>& capture,
                                   const c10::Stream& stream) {
  const auto state = std::make_shared<State>(stream.device_index());
  state->capture = capture;
  state->place_in_capture = capture->place_on(
      stream, [state](const c10::Stream& other) { state->of_replay = DeviceEvent::record(other); });
  return DeviceEvent(state);
}

void DeviceEvent::block(const c10::Stream& stream) const {
  if (state_->capture)
    return state_->capture->wait_on(
        stream, state_->place_in_capture,
        [state = state_](const c10::Stream& other) { state->of_replay->block(other); });
  refuse_in_capture(stream, "a wait for an event that was recorded outside of it (isolation)");
  block_uncaptured(stream);
}

void DeviceEvent::block_uncaptured(const c10::Stream& stream) const {
  worker_of(stream).push(
      {"", [state = state_] { state->wait(); }, [state = state_] { state->hurry(); }});
}

bool DeviceEvent::reached() const {
  state_->refuse_host("query");
  return time().has_value();
}

bool DeviceEvent::query() const {
  throw_device_error(state_->device);
  return reached();
}

void DeviceEvent::synchronize() const {
  state_->refuse_host("synchronize event");
  const bool here = current_device() == state_->device;
  count_wait(state_->device, here ? "synchronize event" : "synchronize event elsewhere");
  state_->hurry();
  state_->wait();
  throw_device_error(state_->device);
}

std::optional<DeviceEvent::Clock::time_point> DeviceEvent::time() const {
  state_->refuse_host("time");
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->time;
}

}  // namespace lockstep::testing
