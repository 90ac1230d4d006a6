#pragma once

// Internal.

#include <condition_variable>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/parallel_state/work.h"

namespace lockstep {

class Communicator;
class FailureBoard;
struct RecordedCall;
using RecordedCalls = std::vector<RecordedCall>;

/// Watches a rank's operations on tensors of a device, for which no thread of the host waits, and
/// those whose start blocks the host. Ten times a second a thread looks whether one has failed or
/// has not ended within the timeout of its group, or is under way although another rank has posted
/// a failure. Then it finds out why, as for operations on the CPU, and aborts the rank's
/// communicators, so that whatever waits for the device goes on, with values that mean nothing.
/// From then on check() throws.
class DeviceWatch {
 public:
  explicit DeviceWatch(std::shared_ptr<FailureBoard> failures);
  ~DeviceWatch();
  DeviceWatch(const DeviceWatch&) = delete;
  DeviceWatch& operator=(const DeviceWatch&) = delete;

  /// Of a communicator that is to be aborted.
  void include(const std::shared_ptr<Communicator>& communicator);
  /// Of an operation that is being started, which may block the host.
  void begin(std::shared_ptr<Work::Operation> operation);
  /// Of an operation that has been started.
  void add(std::shared_ptr<Work::Operation> operation);
  /// Of one that could not be started. CommunicationError as check().
  void forget(const Work::Operation& operation);
  /// Until stop_recording() calls join `calls` (see record()), and add() does nothing.
  void start_recording(std::shared_ptr<RecordedCalls> calls);
  void stop_recording();
  bool is_recording() const;
  /// Takes note of a call, in a recording.
  void record(const RecordedCall& call);
  /// CommunicationError once an operation has failed: what the thread found out.
  void check() const;
  /// Returns when all operations have ended, or one or the job has failed. Later ones are not
  /// watched.
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

  const std::shared_ptr<FailureBoard> failures_;
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
