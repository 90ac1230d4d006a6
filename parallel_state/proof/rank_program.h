#pragma once

// Internal.

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/parallel_state/collective_operation.h"
#include "lockstep/parallel_state/rank_generator.h"

/// The communication of a rank, as data. Needs no libtorch.
namespace lockstep {

/// A communicator that a rank uses.
struct ProgramGroup {
  std::string name;        ///< of the group: "dp-cp"
  std::string apart = {};  ///< distinguishes communicators of the same ranks; mostly empty
  RankList ranks = {};     ///< of the rank that was recorded: global, in group order
  int64_t position = 0;    ///< of that rank
};

/// A call of a collective or a message. Equal calls of a program share one entry.
struct ProgramCall {
  uint32_t group = 0;  ///< in RankProgram::groups
  CollectiveOperation operation = {};
  std::string label = {};  ///< what is communicated
  std::string dtype = {};
  int64_t numel = 0;  ///< elements of the rank's input; -1 if ranks may differ in it
  int64_t bytes = 0;  ///< of the rank's input
  bool on_device = false;

  /// A send or a receive; an exchange is a collective.
  bool is_message() const;
  bool operator==(const ProgramCall&) const = default;
};

/// Work that a rank gives its device's current stream. Equal kernels of a program share one entry.
struct ProgramKernel {
  std::string name = {};  ///< of the operator: "aten::mm"
  std::string dtype = {};
  double flops = 0;   ///< of matrix products; 0 if there are none
  int64_t bytes = 0;  ///< that it reads and writes
  bool backward = false;
  bool operator==(const ProgramKernel&) const = default;
};

/// One thing that the host of a rank does.
struct ProgramEvent {
  enum class Kind : uint8_t {
    connect,    ///< connects group `value`; returns once all its members do
    pair,       ///< connects the two ends of message `value` for messages on a device
    start,      ///< starts call `value`
    wait,       ///< waits for the `value`-th start (from 0): on a device, its stream waits
    host_wait,  ///< the host waits until the device has passed the first `value` waits
    kernel,     ///< hands kernel `value` to the device's current stream; recorded only on request
  };
  Kind kind = Kind::start;
  uint32_t value = 0;
  bool operator==(const ProgramEvent&) const = default;
};

/// Everything that one rank does, in host order.
struct RankProgram {
  int64_t rank = 0;  ///< that was recorded
  std::vector<ProgramGroup> groups = {};
  std::vector<ProgramCall> calls = {};
  std::vector<ProgramKernel> kernels = {};
  std::vector<ProgramEvent> events = {};
  std::vector<size_t> step_ends = {};  ///< for each training step, events up to its end
  int64_t peak_bytes = 0;              ///< the most that its tensors on the device take
  int64_t repeated_tasks = 0;          ///< of the pipeline, that were not run: see RepeatedTasks

  /// Number of starts.
  int64_t num_operations() const;
};

/// "all_reduce (sum) of bucket 1, 10 x Float over dp [1, 3]" as rank `ranks[position]` calls it; a
/// message names the other rank: "send to rank 3 of ...".
std::string describe(const ProgramCall& call, const std::string& group, const RankList& ranks);

/// "dp [1, 3]", with the middle of a long list left out.
std::string group_text(const std::string& name, const RankList& ranks);

}  // namespace lockstep
