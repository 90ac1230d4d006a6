#pragma once

// Internal.

#include <condition_variable>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <c10/core/Device.h>

#include "lockstep/parallel_state/work.h"

namespace lockstep {

class Communicator;
class FailureBoard;
struct RecordedCall;
using RecordedCalls = std::vector<RecordedCall>;

/// Watches a rank's operations on device tensors, for which no host thread waits, and operations
/// whose start blocks the host. Ten times a second a thread checks whether one has failed, has not
/// ended within its group's timeout, or is still in progress although another rank has posted a
/// failure. If so, the thread finds out why, as for operations on the CPU, and aborts the rank's
/// communicators, so that whatever waits for the device continues, with meaningless values. From
/// then on check() throws.
class DeviceWatch {
 public:
  DeviceWatch(std::shared_ptr<FailureBoard> failures, c10::Device device);
  ~DeviceWatch();
  DeviceWatch(const DeviceWatch&) = delete;
  DeviceWatch& operator=(const DeviceWatch&) = delete;

  /// Adds a communicator that is to be aborted after a failure.
  void include(const std::shared_ptr<Communicator>& communicator);
  /// Watches an operation that is being started, which may block the host.
  void begin(std::shared_ptr<Work::Operation> operation);
  /// Watches an operation that has been started.
  void add(std::shared_ptr<Work::Operation> operation);
  /// Drops an operation that could not be started. CommunicationError as check().
  void forget(const Work::Operation& operation);
  /// Until stop_recording(), calls are appended to `calls` (see record()), and add() does nothing.
  void start_recording(std::shared_ptr<RecordedCalls> calls);
  void stop_recording();
  bool is_recording() const;
  /// Appends a call to the recording, if there is one.
  void record(const RecordedCall& call);
  /// CommunicationError once an operation has failed: what the thread found out.
  void check() const;
  /// Returns when all operations have ended, or when one of them or the job has failed; then the
  /// communicators have been aborted. Later operations are not watched.
  void finish();

 private:
  using Operations = std::list<std::shared_ptr<Work::Operation>>;

  void watch(Operations& operations, std::shared_ptr<Work::Operation> operation);
  void drop_start(const Work::Operation& operation);
  bool idle() const { return starting_.empty() && under_way_.empty(); }
  void look_out();
  /// The operation that has failed, and why; forgets those that have ended.
  std::pair<std::shared_ptr<Work::Operation>, std::string> look();
  void fail(const Work::Operation& operation, const std::string& reason);
  /// All at once: an abort may wait for a kernel on the device, or for the end of a recorded graph,
  /// and another communicator may have to be aborted before that comes.
  void abort_communicators();

  const std::shared_ptr<FailureBoard> failures_;
  const c10::Device device_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  Operations starting_;  ///< whose parts are not there yet
  Operations under_way_;
  std::vector<std::weak_ptr<Communicator>> communicators_;
  std::shared_ptr<RecordedCalls> recording_;  ///< null: none
  std::string error_;                         ///< empty: none
  bool ending_ = false;
  std::thread thread_;
};

}  // namespace lockstep
