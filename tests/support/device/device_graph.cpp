#include "lockstep/kernels/device_graph.h"

#include <optional>

#include "lockstep/tests/support/device/device_registration.h"
#include "lockstep/tests/support/device/device_state.h"
#include "lockstep/tests/support/device/device_streams.h"
#include "lockstep/tests/support/device/graph_capture.h"
#include "lockstep/tests/support/device/memory_pool.h"

namespace lockstep::testing {
namespace {

class LaggingGraph final : public kernels::DeviceGraph {
 public:
  ~LaggingGraph() override {
    if (!capture_) return;
    capture_->abandon();
    MemoryPool::instance().release_graph(capture_->id(), last_end_);
  }

  void begin_capture() override {
    TORCH_CHECK(!capture_, "lagging device: a graph is captured once");
    capture_ = GraphCapture::begin(current_stream(current_device()));
  }

  void end_capture() override {
    TORCH_CHECK(capture_, "lagging device: end_capture() without begin_capture()");
    recording_ = capture_->end(current_stream(current_device()));
    streams_ = recording_->lanes;
    for (size_t lane = 1; lane < streams_.size(); ++lane)
      streams_[lane] = new_stream(streams_[lane].device_index());
  }

  void replay() override {
    TORCH_CHECK(recording_, "lagging device: replay() without a capture that has succeeded");
    const c10::Stream origin = current_stream(streams_.front().device_index());
    refuse_in_capture(origin, "the replay of another graph");
    streams_.front() = origin;
    count_replay(origin.device_index());
    if (last_end_) last_end_->block(origin);
    const DeviceEvent begin = DeviceEvent::record(origin);
    for (size_t lane = 1; lane < streams_.size(); ++lane) begin.block(streams_[lane]);
    for (const Recording::Entry& entry : recording_->entries) entry.launch(streams_[entry.lane]);
    for (size_t lane = 1; lane < streams_.size(); ++lane)
      DeviceEvent::record(streams_[lane]).block(origin);
    last_end_ = DeviceEvent::record(origin);
  }

 private:
  std::shared_ptr<GraphCapture> capture_;
  std::optional<Recording> recording_;
  std::vector<c10::Stream> streams_;     ///< stream of each lane in a replay
  std::optional<DeviceEvent> last_end_;  ///< end of the last replay
};

}  // namespace

void register_lagging_graphs() {
  kernels::register_device_graphs(kLagging, [] { return std::make_unique<LaggingGraph>(); });
}

}  // namespace lockstep::testing
