#pragma once

// Internal: what a rank communicates in work that is recorded once and launched many times, as a
// CUDA graph.

#include <memory>
#include <string>
#include <vector>

#include "lockstep/parallel_state/collective_operation.h"
#include "lockstep/parallel_state/collective_record.h"
#include "lockstep/parallel_state/process_group.h"

namespace lockstep {

/// One call of a collective or message, as it is noted at each launch.
struct RecordedCall {
  std::shared_ptr<const ProcessGroup::State> group;
  CollectiveOperation operation;
  std::vector<CollectiveRecord> shown;  ///< to the observer
  int64_t numel = 0;                    ///< as the ledger has it
};

/// The calls of a recording, in their order.
using RecordedCalls = std::vector<RecordedCall>;

/// As long as it lives, calls with tensors of this rank's device are kept here and neither noted
/// nor watched: they are being recorded, and nothing is in progress. Only one may exist at a time.
class CallRecorder {
 public:
  /// `world`: of the rank's ParallelState.
  explicit CallRecorder(const ProcessGroup& world);
  ~CallRecorder();
  CallRecorder(const CallRecorder&) = delete;
  CallRecorder& operator=(const CallRecorder&) = delete;

  const RecordedCalls& calls() const { return *calls_; }

 private:
  std::shared_ptr<const ProcessGroup::State> world_;
  std::shared_ptr<RecordedCalls> calls_;
};

/// Call these around a launch of the recording. note_launch(), before it, enters the calls into the
/// groups' ledgers and shows them to the observer, as if each were made now. watch_launch(), after
/// it, watches the device's current stream up to that point. CommunicationError if something has
/// failed.
void note_launch(const RecordedCalls& calls);
void watch_launch(const RecordedCalls& calls, c10::Device device);

}  // namespace lockstep
