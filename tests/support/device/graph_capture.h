#pragma once

// Internal: a capture of a graph, its streams and what was recorded on them.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <c10/core/Stream.h>

namespace lockstep::testing {

/// Puts work on a stream. In a replay, that stream replaces the captured one.
using Launch = std::function<void(const c10::Stream& stream)>;

/// The captured work, in the order of the host's calls.
struct Recording {
  struct Entry {
    size_t lane;
    Launch launch;
  };
  std::vector<c10::Stream> lanes;  ///< the captured streams; the first is the origin
  std::vector<Entry> entries;
};

/// A capture lasts from begin() to end() or abandon(). A stream joins when it waits for an event of
/// a captured stream. What CUDA refuses in a capture throws a c10::Error here that names it. The
/// first such error makes the capture invalid, and every later launch in it throws.
class GraphCapture {
 public:
  /// A position in a capture: how many launches of each lane come before it.
  using Place = std::vector<int64_t>;

  /// Throws c10::Error for a default stream, or one that is already captured.
  static std::shared_ptr<GraphCapture> begin(const c10::Stream& origin);
  /// The capture that `stream` is in, or null.
  static std::shared_ptr<GraphCapture> of(const c10::Stream& stream);
  /// A capture that includes a stream of the device, or null.
  static std::shared_ptr<GraphCapture> on(c10::DeviceIndex device);

  /// Not 0, and unique among captures.
  int64_t id() const { return id_; }

  /// Records a launch. The origin has to wait for it before the end. `what` is for messages.
  void record(const c10::Stream& stream, const std::string& what, Launch launch);
  /// Records work that is not a launch. Does nothing in an invalid capture.
  void record_bookkeeping(const c10::Stream& stream, Launch launch);
  /// The current position of `stream`.
  Place place_on(const c10::Stream& stream, Launch mark);
  /// Makes `stream` wait for the position. It joins the capture if it is not in one.
  void wait_on(const c10::Stream& stream, const Place& place, Launch wait);

  /// Throws, and invalidates the capture if it is under way.
  [[noreturn]] void refuse(const std::string& what);

  /// Releases the streams. Throws c10::Error if the capture is invalid or a joined stream has work
  /// that the origin does not wait for. Throws without releasing them if `stream` is not the
  /// origin.
  Recording end(const c10::Stream& stream);
  /// Releases the streams and forgets what was recorded.
  void abandon();

 private:
  struct Lane {
    c10::Stream stream;
    Place place;       ///< what the next launch here comes after; for this lane, its own launches
    std::string last;  ///< name of the last launch
  };

  GraphCapture(const c10::Stream& origin, int64_t id);
  // Caller holds the lock of all captures:
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

/// Calls it now, or at every replay of the graph if the stream is being captured.
void now_or_at_replays(const c10::Stream& stream, const std::function<void()>& call);

/// If the stream is captured, throws c10::Error and invalidates the capture: what the host does
/// here would happen once, not in every replay.
void refuse_in_capture(const c10::Stream& stream, const std::string& what);

}  // namespace lockstep::testing
