#include "lockstep/tests/support/device/graph_capture.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <sstream>
#include <utility>

#include <c10/util/Exception.h>

namespace lockstep::testing {
namespace {

using StreamKey = std::pair<c10::DeviceIndex, c10::StreamId>;

/// State of all captures. Never destroyed: tensors may be freed during process exit.
struct Captures {
  std::mutex mutex;
  std::map<StreamKey, std::shared_ptr<GraphCapture>> by_stream;
  std::atomic<size_t> captured_streams{0};
  int64_t last_id = 0;

  void set(const c10::Stream& stream, std::shared_ptr<GraphCapture> capture) {
    by_stream[{stream.device_index(), stream.id()}] = std::move(capture);
    captured_streams = by_stream.size();
  }
  void erase(const c10::Stream& stream) {
    by_stream.erase({stream.device_index(), stream.id()});
    captured_streams = by_stream.size();
  }
  std::shared_ptr<GraphCapture> find(const c10::Stream& stream) const {
    const auto found = by_stream.find({stream.device_index(), stream.id()});
    return found == by_stream.end() ? nullptr : found->second;
  }
};

Captures& captures() {
  static auto* const value = new Captures;
  return *value;
}

std::string text_of(const c10::Stream& stream) {
  std::ostringstream text;
  text << (stream.id() == 0 ? "the default stream" : "stream " + std::to_string(stream.id()))
       << " of " << stream.device();
  return text.str();
}

void merge(GraphCapture::Place& into, const GraphCapture::Place& other) {
  into.resize(std::max(into.size(), other.size()));
  for (size_t lane = 0; lane < other.size(); ++lane) into[lane] = std::max(into[lane], other[lane]);
}

int64_t at_lane(const GraphCapture::Place& place, size_t lane) {
  return lane < place.size() ? place[lane] : 0;
}

}  // namespace

GraphCapture::GraphCapture(const c10::Stream& origin, int64_t id) : id_(id) {
  lanes_.push_back({origin, {0}, ""});
}

std::shared_ptr<GraphCapture> GraphCapture::begin(const c10::Stream& origin) {
  Captures& all = captures();
  const std::lock_guard<std::mutex> lock(all.mutex);
  TORCH_CHECK(origin.id() != 0,
              "lagging device: graphs must be captured on a stream that is not the default one");
  TORCH_CHECK(!all.find(origin), "lagging device: ", text_of(origin), " is captured already");
  const std::shared_ptr<GraphCapture> capture(new GraphCapture(origin, ++all.last_id));
  all.set(origin, capture);
  return capture;
}

std::shared_ptr<GraphCapture> GraphCapture::of(const c10::Stream& stream) {
  Captures& all = captures();
  if (all.captured_streams == 0) return nullptr;
  const std::lock_guard<std::mutex> lock(all.mutex);
  return all.find(stream);
}

std::shared_ptr<GraphCapture> GraphCapture::on(c10::DeviceIndex device) {
  Captures& all = captures();
  if (all.captured_streams == 0) return nullptr;
  const std::lock_guard<std::mutex> lock(all.mutex);
  for (const auto& [stream, capture] : all.by_stream)
    if (stream.first == device) return capture;
  return nullptr;
}

size_t GraphCapture::lane_of(const c10::Stream& stream) const {
  const auto found = std::find_if(lanes_.begin(), lanes_.end(),
                                  [&](const Lane& lane) { return lane.stream == stream; });
  return static_cast<size_t>(found - lanes_.begin());
}

void GraphCapture::add(size_t lane, Launch launch) {
  entries_.push_back({lane, std::move(launch)});
}

void GraphCapture::record(const c10::Stream& stream, const std::string& what, Launch launch) {
  const std::lock_guard<std::mutex> lock(captures().mutex);
  TORCH_CHECK(error_.empty(), "lagging device: ", what,
              " in a capture that is invalid since: ", error_);
  Lane& lane = lanes_.at(lane_of(stream));
  const auto index = static_cast<size_t>(&lane - lanes_.data());
  lane.place.resize(std::max(lane.place.size(), index + 1));
  ++lane.place[index];
  lane.last = what;
  add(index, std::move(launch));
}

void GraphCapture::record_bookkeeping(const c10::Stream& stream, Launch launch) {
  const std::lock_guard<std::mutex> lock(captures().mutex);
  if (error_.empty() && under_way_) add(lane_of(stream), std::move(launch));
}

GraphCapture::Place GraphCapture::place_on(const c10::Stream& stream, Launch mark) {
  const std::lock_guard<std::mutex> lock(captures().mutex);
  const size_t lane = lane_of(stream);
  add(lane, std::move(mark));
  return lanes_.at(lane).place;
}

void GraphCapture::wait_on(const c10::Stream& stream, const Place& place, Launch wait) {
  std::string refused;
  {
    const std::lock_guard<std::mutex> lock(captures().mutex);
    const auto other = captures().find(stream);
    if (!under_way_)
      refused = " for an event of a capture that has ended";
    else if (stream.id() == 0)
      refused = " for a captured event: the default stream cannot join a capture";
    else if (other && other.get() != this)
      refused = " for an event of another capture than its own";
    if (refused.empty()) {
      join(stream);
      const size_t lane = lane_of(stream);
      merge(lanes_[lane].place, place);
      return add(lane, std::move(wait));
    }
  }
  refuse(text_of(stream) + " waits" + refused);
}

void GraphCapture::join(const c10::Stream& stream) {
  Captures& all = captures();
  if (all.find(stream)) return;
  all.set(stream, all.find(lanes_.front().stream));
  lanes_.push_back({stream, {}, ""});
}

void GraphCapture::refuse(const std::string& what) {
  {
    const std::lock_guard<std::mutex> lock(captures().mutex);
    if (under_way_ && error_.empty()) error_ = what;
  }
  TORCH_CHECK(false, "lagging device: not permitted in the capture of a graph: ", what);
}

void GraphCapture::release() {
  for (const Lane& lane : lanes_) captures().erase(lane.stream);
  under_way_ = false;
}

std::string GraphCapture::unjoined() const {
  for (size_t lane = 1; lane < lanes_.size(); ++lane)
    if (at_lane(lanes_[lane].place, lane) > at_lane(lanes_.front().place, lane))
      return lanes_[lane].last + " on " + text_of(lanes_[lane].stream);
  return "";
}

Recording GraphCapture::end(const c10::Stream& stream) {
  Recording recording;
  const std::lock_guard<std::mutex> lock(captures().mutex);
  TORCH_CHECK(stream == lanes_.front().stream,
              "lagging device: a capture must end on the stream where it began; found ",
              text_of(stream), ", allowed: ", text_of(lanes_.front().stream));
  release();
  recording.entries.swap(entries_);
  TORCH_CHECK(error_.empty(), "lagging device: the capture is invalid since: ", error_);
  const std::string left = unjoined();
  TORCH_CHECK(left.empty(), "lagging device: unjoined work at the end of a capture: ", left,
              ", for which ", text_of(stream), " does not wait");
  for (const Lane& lane : lanes_) recording.lanes.push_back(lane.stream);
  return recording;
}

void GraphCapture::abandon() {
  std::vector<Recording::Entry> entries;
  const std::lock_guard<std::mutex> lock(captures().mutex);
  if (!under_way_) return;
  release();
  entries.swap(entries_);
}

void now_or_at_replays(const c10::Stream& stream, const std::function<void()>& call) {
  const auto capture = GraphCapture::of(stream);
  if (!capture) return call();
  capture->record_bookkeeping(stream, [call](const c10::Stream&) { call(); });
}

void refuse_in_capture(const c10::Stream& stream, const std::string& what) {
  if (const auto capture = GraphCapture::of(stream)) capture->refuse(what);
}

}  // namespace lockstep::testing
