#pragma once

// Internal: a capture of a graph, the streams that it has and what was recorded on them.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <c10/core/Stream.h>

namespace lockstep::testing {

/// Puts work on a stream, which is the captured one's stand-in in a replay.
using Launch = std::function<void(const c10::Stream& stream)>;

/// What was captured, in the order of the host's calls.
struct Recording {
  struct Entry {
    size_t lane;
    Launch launch;
  };
  std::vector<c10::Stream> lanes;  ///< the captured streams; the first is the origin
  std::vector<Entry> entries;
};

/// From begin() to end() or abandon(). Streams join when they wait for an event of a captured
/// stream. What CUDA refuses in a capture is a c10::Error here that names it; after the first the
/// capture is invalid, and so is all that is launched in it.
class GraphCapture {
 public:
  /// A place in a capture: how many launches of each lane come before it.
  using Place = std::vector<int64_t>;

  /// c10::Error: a default stream, or one that is captured already.
  static std::shared_ptr<GraphCapture> begin(const c10::Stream& origin);
  /// The capture that `stream` is in, or null.
  static std::shared_ptr<GraphCapture> of(const c10::Stream& stream);
  /// A capture with streams of the device, or null.
  static std::shared_ptr<GraphCapture> on(c10::DeviceIndex device);

  /// Not 0, and of no other capture.
  int64_t id() const { return id_; }

  /// Of a launch, for which the origin has to wait before the end. `what` is for messages.
  void record(const c10::Stream& stream, const std::string& what, Launch launch);
  /// Of what is no launch. Nothing in an invalid capture.
  void record_bookkeeping(const c10::Stream& stream, Launch launch);
  /// Where `stream` is now.
  Place place_on(const c10::Stream& stream, Launch mark);
  /// `stream` comes behind the place, and joins the capture if it is not in it.
  void wait_on(const c10::Stream& stream, const Place& place, Launch wait);

  /// Throws, and makes a capture that is under way invalid.
  [[noreturn]] void refuse(const std::string& what);

  /// Releases the streams. c10::Error: the capture is invalid, a stream that has joined has work
  /// that the origin does not wait for; and, without releasing them, a stream that is not the
  /// origin.
  Recording end(const c10::Stream& stream);
  /// Releases the streams and forgets what was recorded.
  void abandon();

 private:
  struct Lane {
    c10::Stream stream;
    Place place;       ///< what comes before the next launch here, of this lane its own launches
    std::string last;  ///< launch
  };

  GraphCapture(const c10::Stream& origin, int64_t id);
  // Under the lock of all captures:
  size_t lane_of(const c10::Stream& stream) const;
  void join(const c10::Stream& stream);
  void add(size_t lane, Launch launch);
  void release();
  std::string unjoined() const;

  const int64_t id_;
  bool under_way_ = true;
  std::string error_;
  std::vector<Lane> lanes_;
  std::vector<Recording::Entry> entries_;
};

/// Now, or at every replay of the graph that captures the stream.
void now_or_at_replays(const c10::Stream& stream, const std::function<void()>& call);

/// c10::Error if the stream is captured, and the capture is invalid: what the host does here would
/// happen once and not in the replays.
void refuse_in_capture(const c10::Stream& stream, const std::string& what);

}  // namespace lockstep::testing
