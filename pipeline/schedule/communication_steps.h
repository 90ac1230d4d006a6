#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/pipeline/schedule.h"

/// The transfers between the tasks of a schedule.
namespace lockstep {

/// One thing that a rank does: run a task, send the task's output (an activation after a forward, a
/// gradient after a backward), or receive the task's input.
struct PipelineStep {
  enum class Kind { compute, send, receive };
  Kind kind = Kind::compute;
  PipelineTask task;  ///< a task of the rank itself, in all three kinds
  int64_t peer = -1;  ///< the other rank of a transfer
  bool operator==(const PipelineStep&) const = default;
};

/// "B0.1", "send B0.1 to rank 2", "receive for B0.1 from rank 3"
std::string to_string(const PipelineStep& step);

/// The steps of each rank.
using StepLists = std::vector<std::vector<PipelineStep>>;

/// Tasks and transfers of all ranks in an order that cannot deadlock, even if every send and every
/// receive blocks until the other side reaches it. All ranks' lists are cut from one list of
/// events, in which one transfer represents both its send and its receive: the earliest event that
/// is not done is the next step of each rank that takes part in it. The events are sorted by the
/// time at which they would happen with reference_cost(), however long the tasks really take.
///
/// With reference_cost() blocking costs no time if each rank has one chunk. With several chunks it
/// does (up to 1.6 times the duration was seen), so sends should not block there.
///
/// A caller whose transfers do not block may start a receive earlier than its position: see
/// early_receives(). UsageError: as check_schedule().
StepLists communication_steps(const PipelineSchedule& schedule);

/// When `rank`, whose transfers do not block, may start its receives: element i lists the receives,
/// as positions in its steps, that it starts before step i. `steps` are those of
/// communication_steps(). Each receive is started as early as possible, but
///
///   - not ahead of another transfer with the same rank, because both ranks of a pair must see its
///     transfers in the same order;
///   - if the ranks form a circle (several chunks on three ranks or more), not ahead of any other
///     transfer. Then the lists cannot deadlock in this order either, even if all transfers block.
///     On a device they do whenever a host waits for its device, for example to free memory: a
///     receive that has started is a running kernel. In a chain of ranks the first rule is enough;
///   - not before the input that arrived from that rank two messages of the same kind earlier is in
///     use. So at most two inputs of a kind from one rank wait for their tasks, if the rank uses
///     them in the order in which they are sent, as in all schedules of make_schedule(). Otherwise
///     more may wait, each until its task.
std::vector<std::vector<size_t>> early_receives(const StepLists& steps, int64_t rank);

}  // namespace lockstep
