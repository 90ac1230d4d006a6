#include "lockstep/planner/link_plan.h"

#include <algorithm>
#include <map>

#include "lockstep/core/check.h"
#include "lockstep/core/integers.h"
#include "lockstep/planner/ring_bytes.h"

namespace lockstep {
namespace {

using EventKind = ProgramEvent::Kind;
using OperationKind = CollectiveOperation::Kind;

/// The data that a rank sends in one group in one step.
struct Sent {
  int64_t operations = 0;
  int64_t ring_bytes = 0;                         ///< to the next rank
  int64_t all_bytes = 0;                          ///< to all others, equal parts
  std::map<int64_t, int64_t> broadcasts = {};     ///< by the source's position
  std::map<int64_t, int64_t> message_bytes = {};  ///< by the other's distance in positions
};

void note(Sent& sent, const ProgramCall& call, const ProgramGroup& group) {
  const CollectiveOperation& operation = call.operation;
  if (operation.kind == OperationKind::comparison) return;
  ++sent.operations;
  const auto size = static_cast<int64_t>(group.ranks.size());
  const int64_t bytes = ring_bytes(operation.kind, call.bytes, size);
  switch (operation.kind) {
    case OperationKind::broadcast:
      sent.broadcasts[operation.position] += bytes;
      break;
    case OperationKind::all_to_all:
    case OperationKind::all_to_all_rows:
    case OperationKind::all_to_all_dims:
      sent.all_bytes += bytes;
      break;
    case OperationKind::send:
    case OperationKind::exchange:
      sent.message_bytes[(operation.position - group.position + size) % size] += bytes;
      break;
    default:
      sent.ring_bytes += bytes;
  }
}

/// The data sent in the last step, by group of the program.
std::vector<Sent> sent_in_last_step(const RankProgram& program) {
  const size_t steps = program.step_ends.size();
  require<UsageError>(steps > 0, "program of rank {}: no training step is recorded", program.rank);
  const size_t begin = steps > 1 ? program.step_ends[steps - 2] : 0;
  std::vector<Sent> groups(program.groups.size());
  for (size_t i = begin; i < program.step_ends.back(); ++i) {
    const ProgramEvent& event = program.events[i];
    if (event.kind != EventKind::start) continue;
    const ProgramCall& call = program.calls[event.value];
    note(groups[call.group], call, program.groups[call.group]);
  }
  return groups;
}

/// A group as one of its ranks sees it.
class Place {
 public:
  Place(const RankList& ranks, int64_t rank, int64_t ranks_per_host)
      : ranks_(ranks), per_host_(ranks_per_host) {
    const auto lower = std::lower_bound(ranks.begin(), ranks.end(), rank);
    const auto found = lower != ranks.end() && *lower == rank
                           ? lower
                           : std::find(ranks.begin(), ranks.end(), rank);
    position_ = found - ranks.begin();
    host_ = rank / per_host_;
  }

  bool is_here(int64_t further) const {
    const auto other = static_cast<size_t>((position_ + further) % size());
    return ranks_[other] / per_host_ == host_;
  }
  int64_t others_here() const {
    return std::count_if(ranks_.begin(), ranks_.end(),
                         [&](int64_t rank) { return rank / per_host_ == host_; }) -
           1;
  }
  bool is_before(int64_t position) const { return (position_ + 1) % size() == position; }
  int64_t size() const { return static_cast<int64_t>(ranks_.size()); }

 private:
  const RankList& ranks_;
  int64_t per_host_;
  int64_t position_ = 0;
  int64_t host_ = 0;
};

void add(LinkUse& use, const Sent& sent, const Place& place) {
  int64_t total = 0;
  const auto send = [&](int64_t bytes, bool here) {
    (here ? use.inside_bytes : use.between_bytes) += bytes;
    total += bytes;
  };
  use.operations += sent.operations;
  send(sent.ring_bytes, place.is_here(1));
  for (const auto& [source, bytes] : sent.broadcasts)
    if (!place.is_before(source)) send(bytes, place.is_here(1));
  for (const auto& [further, bytes] : sent.message_bytes) send(bytes, place.is_here(further));
  if (sent.all_bytes > 0) {
    const int64_t here = sent.all_bytes * place.others_here() / (place.size() - 1);
    send(here, true);
    send(sent.all_bytes - here, false);
  }
  use.ranks = std::max(use.ranks, place.size());
  use.most_of_a_rank = std::max(use.most_of_a_rank, total);
}

}  // namespace

int64_t LinkPlan::inside_bytes() const {
  int64_t bytes = 0;
  for (const LinkUse& use : groups) bytes += use.inside_bytes;
  return bytes;
}

int64_t LinkPlan::between_bytes() const {
  int64_t bytes = 0;
  for (const LinkUse& use : groups) bytes += use.between_bytes;
  return bytes;
}

LinkPlan plan_links(const JobProgram& job, int64_t ranks_per_host) {
  require<ConfigError>(ranks_per_host >= 1, "ranks-per-host: found {}, allowed: >= 1",
                       ranks_per_host);
  const JobGroups groups(job);
  std::vector<std::vector<Sent>> sent;
  for (const RankProgram& program : job.programs) sent.push_back(sent_in_last_step(program));
  std::map<std::string, LinkUse> uses;
  for (int64_t rank = 0; rank < job.world_size(); ++rank) {
    const uint32_t index = job.program_of[static_cast<size_t>(rank)];
    for (uint32_t g = 0; g < sent[index].size(); ++g) {
      if (sent[index][g].operations == 0) continue;
      LinkUse& use = uses[job.programs[index].groups[g].name];
      add(use, sent[index][g], Place(groups.ranks_of(rank, g), rank, ranks_per_host));
    }
  }
  LinkPlan plan{.ranks_per_host = ranks_per_host,
                .hosts = ceil_div(job.world_size(), ranks_per_host)};
  for (auto& [name, use] : uses) {
    use.group = name;
    plan.groups.push_back(std::move(use));
  }
  return plan;
}

}  // namespace lockstep
