#pragma once

// Internal.

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "lockstep/parallel_state/job_program.h"
#include "lockstep/parallel_state/order_proof.h"

namespace lockstep {

/// Runs one rank of each class of a job whose operations match, see prove_order(). Nothing takes
/// time: whatever can happen happens, in any order.
class OrderSimulation {
 public:
  enum class Rules { nccl, gloo };

  OrderSimulation(const JobProgram& job, const JobGroups& groups, Rules rules);

  /// The places where ranks wait for each other; nothing if all finish.
  std::optional<OrderVerdict> run();

 private:
  /// Something that is over once all have reached it: an operation, or a blocked host.
  struct Meeting {
    uint32_t needed = 0, arrived = 0;
    const std::vector<uint32_t>* classes = nullptr;  ///< whose ranks take part
    bool over() const { return arrived == needed; }
  };
  /// A start of a class, identified by its place among the starts.
  struct Operation {
    uint32_t call = 0;
    uint32_t meeting = 0;
    uint32_t waits_before = 0;  ///< of the device's current stream
    bool streamed = false;      ///< follows NCCL's rules
    bool chained = false;       ///< a collective that follows them
    bool posted = false;        ///< its rank has reached it
  };
  /// A rank of a class while it runs.
  struct Run {
    uint32_t rank_class = 0;
    const RankProgram* program = nullptr;
    size_t event = 0;      ///< the next one for the host
    uint32_t started = 0;  ///< operations
    bool held = false;     ///< the host has reached the meeting that blocks it
    std::vector<Operation> operations = {};
    std::vector<uint32_t> waits = {};  ///< operations that the device's current stream waits for
    size_t waited = 0;                 ///< of them
    std::map<std::pair<uint32_t, int64_t>, std::deque<uint32_t>> streams = {};
    std::deque<uint32_t> chain = {};  ///< chained operations that are not done
    std::set<std::tuple<uint32_t, int64_t, bool>> used = {};  ///< groups and directions
    std::set<uint32_t> came = {};                             ///< to meetings of hosts
    bool finished() const { return event == program->events.size(); }
  };
  /// (kind, orbit, position from, position to, number)
  using Name = std::tuple<char, uint32_t, int64_t, int64_t, uint32_t>;
  /// The place that a rank has reached, and the meeting that it waits for there.
  struct Place {
    std::string text;
    uint32_t meeting;
  };

  uint32_t meeting(const Name& name, uint32_t needed, const std::vector<uint32_t>& classes);
  uint32_t group_meeting(const Run& run, char kind, uint32_t group, uint32_t number = 0);
  uint32_t message_meeting(const Run& run, char kind, const ProgramCall& call, uint32_t number = 0);
  void prepare(Run& run);

  void advance(Run& run);
  bool step_host(Run& run);
  bool hold(Run& run, uint32_t meeting);
  bool start(Run& run);
  std::optional<uint32_t> first_use(Run& run, const ProgramCall& call);
  bool step_streams(Run& run);
  bool may_post(const Run& run, uint32_t operation) const;
  bool is_done(const Operation& operation) const { return is_over(operation.meeting); }
  bool is_over(uint32_t meeting) const { return meetings_[meeting].over(); }
  void arrive(uint32_t meeting);

  std::optional<Place> place_of(Run& run);
  Place place_of_operation(const Run& run, uint32_t operation) const;
  OrderVerdict explain();
  Run& one_that_is_missing(uint32_t meeting);
  bool has_come(const Run& run, uint32_t meeting) const;
  int64_t rank_of(const Run& run) const { return groups_.classes()[run.rank_class].first_rank; }
  std::string call_text(const Run& run, const ProgramCall& call) const;

  const JobProgram& job_;
  const JobGroups& groups_;
  const Rules rules_;
  std::map<Name, uint32_t> names_;
  std::deque<std::vector<uint32_t>> pairs_;  ///< classes of messages
  std::vector<Meeting> meetings_;
  std::vector<Run> runs_;
  std::deque<uint32_t> due_;  ///< classes for which something may have changed
  std::vector<bool> is_due_;
};

}  // namespace lockstep
