#pragma once

// Internal: an observer of everything that a rank does, in host order.

#include <string>
#include <string_view>

#include <ATen/core/Tensor.h>

#include "lockstep/parallel_state/collective_operation.h"
#include "lockstep/parallel_state/process_group.h"
#include "lockstep/parallel_state/rank_generator.h"
#include "lockstep/parallel_state/work.h"

namespace lockstep {

class Communicator;

/// Observes one rank. Called on the thread that makes the call, before the call has an effect.
class ProgramRecorder {
 public:
  virtual ~ProgramRecorder() = default;
  /// A communicator is created. `apart` distinguishes it from others of the same ranks.
  virtual void on_connect(const Communicator& communicator, const std::string& name,
                          const RankList& ranks, const std::string& apart) = 0;
  /// The ranks at these two positions, of which this is one, connect for messages on a device.
  virtual void on_pair(const ProcessGroup::State& group, int64_t first, int64_t second) = 0;
  /// Returns the operation's number, by which on_wait() knows it.
  virtual uint32_t on_start(const Work::Operation& operation) = 0;
  virtual void on_wait(const Work::Operation& operation) = 0;
  /// Called after the start of a message that sends `tensor` or receives into it. The observer may
  /// fill what is received.
  virtual void on_message(const ProcessGroup::State& group, const CollectiveOperation& called,
                          std::string_view label, const at::Tensor& tensor) = 0;
  /// The length in bytes of the longest text of a rank of the group, if this rank gathers a text of
  /// `own` bytes.
  virtual int64_t longest_text(std::string_view label, int64_t own) = 0;
};

}  // namespace lockstep
