#include "lockstep/parallel_state/operation_matching.h"

#include <algorithm>

#include "lockstep/core/check.h"

namespace lockstep {
namespace {

using OperationKind = CollectiveOperation::Kind;
using Calls = std::vector<uint32_t>;

/// The data that the ranks of a group must agree on in a collective, apart from positions.
bool same_data(const ProgramCall& a, const ProgramCall& b) {
  const bool counted = a.numel >= 0 && b.numel >= 0;
  return a.label == b.label && a.dtype == b.dtype && (!counted || a.numel == b.numel);
}

bool same_collective(const ProgramCall& a, const ProgramCall& b) {
  const CollectiveOperation &x = a.operation, &y = b.operation;
  const bool same_ends = x.kind == OperationKind::exchange || x.position == y.position;
  return x.kind == y.kind && x.reduction == y.reduction && x.numerator == y.numerator &&
         x.denominator == y.denominator && same_ends && same_data(a, b);
}

const RankProgram& program_of(const JobProgram& job, int64_t rank) {
  return job.programs[job.program_of[static_cast<size_t>(rank)]];
}

/// Looks for the first mismatch.
class Matching {
 public:
  Matching(const JobProgram& job, const JobGroups& groups) : job_(job), groups_(groups) {
    for (const RankProgram& program : job.programs) calls_.emplace_back(program);
  }

  std::optional<OrderVerdict> find() const {
    for (const JobGroups::Orbit& orbit : groups_.orbits()) {
      if (auto found = in_group(orbit)) return found;
      if (auto found = exchanges(orbit)) return found;
      if (auto found = messages(orbit)) return found;
    }
    return std::nullopt;
  }

 private:
  uint32_t program_index(const JobGroups::Member& member) const {
    return groups_.classes()[member.rank_class].program;
  }
  const RankProgram& program(const JobGroups::Member& member) const {
    return job_.programs[program_index(member)];
  }
  const Calls& collectives(const JobGroups::Member& member) const {
    return calls_[program_index(member)].collectives[member.group];
  }

  /// A rank of the orbit's group of this member's class.
  int64_t rank_of(const JobGroups::Orbit& orbit, const JobGroups::Member& member) const {
    for (const int64_t rank : orbit.ranks)
      if (groups_.class_of(rank) == member.rank_class) return rank;
    return groups_.classes()[member.rank_class].first_rank;
  }

  std::string text(const JobGroups::Orbit& orbit, const JobGroups::Member& member,
                   size_t place) const {
    const int64_t rank = rank_of(orbit, member);
    const Calls& list = collectives(member);
    if (place < list.size())
      return fmt::format("{}, operation {} of the group",
                         describe(job_, groups_, rank, program(member).calls[list[place]]),
                         place + 1);
    return fmt::format("rank {}: no more than {} operations over {}", rank, list.size(),
                       group_text(program(member).groups[member.group].name,
                                  groups_.ranks_of(rank, member.group)));
  }

  OrderVerdict mismatch(std::vector<int64_t> ranks, std::vector<std::string> operations) const {
    return {.reason = OrderVerdict::Reason::mismatch,
            .ranks = std::move(ranks),
            .operations = std::move(operations)};
  }

  std::optional<OrderVerdict> in_group(const JobGroups::Orbit& orbit) const {
    // What most members do is taken to be right.
    std::optional<std::pair<size_t, std::pair<size_t, size_t>>> first;  // place, members
    for (size_t m = 1; m < orbit.members.size(); ++m) {
      const auto place = difference(orbit.members[0], orbit.members[m]);
      if (place && (!first || *place < first->first)) first = {*place, {0, m}};
    }
    if (!first) return std::nullopt;
    const size_t place = first->first;
    std::vector<size_t> others;
    for (size_t m = 1; m < orbit.members.size(); ++m)
      if (difference(orbit.members[0], orbit.members[m]) == place) others.push_back(m);
    const bool zero_strays = others.size() > 1 && 2 * others.size() > orbit.members.size() &&
                             others.size() + 1 == orbit.members.size();
    const JobGroups::Member &usual = orbit.members[zero_strays ? others[0] : 0],
                            &odd = orbit.members[zero_strays ? 0 : others[0]];
    return mismatch({rank_of(orbit, usual), rank_of(orbit, odd)},
                    {text(orbit, usual, place), text(orbit, odd, place)});
  }

  /// The first place where two members differ.
  std::optional<size_t> difference(const JobGroups::Member& a, const JobGroups::Member& b) const {
    const Calls &first = collectives(a), &second = collectives(b);
    if (&first == &second) return std::nullopt;
    const RankProgram &of_first = program(a), &of_second = program(b);
    uint32_t last_first = UINT32_MAX, last_second = UINT32_MAX;
    for (size_t i = 0; i < std::max(first.size(), second.size()); ++i) {
      if (i >= first.size() || i >= second.size()) return i;
      if (first[i] == last_first && second[i] == last_second) continue;
      if (!same_collective(of_first.calls[first[i]], of_second.calls[second[i]])) return i;
      last_first = first[i];
      last_second = second[i];
    }
    return std::nullopt;
  }

  /// Each exchange that sends to a position must be matched by a receive there.
  std::optional<OrderVerdict> exchanges(const JobGroups::Orbit& orbit) const {
    const auto& places = orbit.by_position;
    const auto size = static_cast<int64_t>(places.size());
    if (size == 0) return std::nullopt;
    // Recorded ends are relative to the position of each rank that shares the program.
    const auto end = [&](int64_t position, int64_t recorded) {
      const int64_t own = program(at(orbit, position)).groups[at(orbit, position).group].position;
      return ((position + recorded - own) % size + size) % size;
    };
    const size_t count = collectives(places[0]).size();
    for (size_t i = 0; i < count; ++i) {
      const auto call = [&](int64_t position) -> const ProgramCall& {
        const JobGroups::Member& member = at(orbit, position);
        return program(member).calls[collectives(member)[i]];
      };
      if (call(0).operation.kind != OperationKind::exchange) continue;
      for (int64_t position = 0; position < size; ++position) {
        const int64_t to = end(position, call(position).operation.position);
        if (end(to, call(to).operation.source) == position) continue;
        return mismatch(
            {orbit.ranks[static_cast<size_t>(position)], orbit.ranks[static_cast<size_t>(to)]},
            {exchange_text(orbit, position, call(position), "sends to", to),
             exchange_text(orbit, to, call(to), "receives from",
                           end(to, call(to).operation.source))});
      }
    }
    return std::nullopt;
  }

  const JobGroups::Member& at(const JobGroups::Orbit& orbit, int64_t position) const {
    return orbit.by_position[static_cast<size_t>(position)];
  }

  std::string exchange_text(const JobGroups::Orbit& orbit, int64_t position,
                            const ProgramCall& call, const char* does, int64_t other) const {
    return fmt::format("{}, {} rank {}",
                       describe(job_, groups_, orbit.ranks[static_cast<size_t>(position)], call),
                       does, orbit.ranks[static_cast<size_t>(other)]);
  }

  const Calls& of_direction(const JobGroups::Orbit& orbit, int64_t position, int64_t other,
                            bool sends) const {
    static const Calls kNothing;
    const JobGroups::Member& member = at(orbit, position);
    const auto& messages = calls_[program_index(member)].messages;
    const auto found = messages.find({{member.group, other}, sends});
    return found == messages.end() ? kNothing : found->second;
  }

  std::optional<OrderVerdict> messages(const JobGroups::Orbit& orbit) const {
    const auto size = static_cast<int64_t>(orbit.by_position.size());
    for (int64_t position = 0; position < size; ++position) {
      const JobGroups::Member& member = at(orbit, position);
      for (const auto& [key, list] : calls_[program_index(member)].messages) {
        const auto& [end, sends] = key;
        if (end.first != member.group) continue;
        const int64_t from = sends ? position : end.second, to = sends ? end.second : position;
        if (auto found = between(orbit, from, to)) return found;
      }
    }
    return std::nullopt;
  }

  std::optional<OrderVerdict> between(const JobGroups::Orbit& orbit, int64_t from,
                                      int64_t to) const {
    const Calls &sent = of_direction(orbit, from, to, true),
                &received = of_direction(orbit, to, from, false);
    const RankProgram &sender = program(at(orbit, from)), &receiver = program(at(orbit, to));
    const int64_t source = orbit.ranks[static_cast<size_t>(from)],
                  target = orbit.ranks[static_cast<size_t>(to)];
    for (size_t i = 0; i < std::max(sent.size(), received.size()); ++i) {
      const bool both = i < sent.size() && i < received.size();
      if (both && same_data(sender.calls[sent[i]], receiver.calls[received[i]])) continue;
      const auto line = [&](int64_t rank, const RankProgram& program, const Calls& list,
                            const char* nothing, int64_t other) {
        if (i < list.size())
          return fmt::format("{}, message {} of the direction",
                             describe(job_, groups_, rank, program.calls[list[i]]), i + 1);
        return fmt::format("rank {}: {} rank {} after {} messages", rank, nothing, other,
                           list.size());
      };
      return mismatch({source, target},
                      {line(source, sender, sent, "sends nothing more to", target),
                       line(target, receiver, received, "receives nothing more from", source)});
    }
    return std::nullopt;
  }

  const JobProgram& job_;
  const JobGroups& groups_;
  std::vector<GroupedCalls> calls_;
};

}  // namespace

GroupedCalls::GroupedCalls(const RankProgram& program) : collectives(program.groups.size()) {
  for (const ProgramEvent& event : program.events) {
    if (event.kind != ProgramEvent::Kind::start) continue;
    const ProgramCall& call = program.calls[event.value];
    if (call.is_message())
      messages[{{call.group, call.operation.position}, call.operation.kind == OperationKind::send}]
          .push_back(event.value);
    else
      collectives[call.group].push_back(event.value);
  }
}

std::optional<OrderVerdict> find_mismatch(const JobProgram& job, const JobGroups& groups) {
  if (const auto& absence = groups.absence()) {
    const ProgramGroup& group = program_of(job, absence->member).groups[absence->group];
    const std::string text =
        group_text(group.name, groups.ranks_of(absence->member, absence->group));
    return OrderVerdict{.reason = OrderVerdict::Reason::mismatch,
                        .ranks = {absence->member, absence->absent},
                        .operations = {fmt::format("rank {}: uses {}", absence->member, text),
                                       fmt::format("rank {}: does not", absence->absent)}};
  }
  return Matching(job, groups).find();
}

std::string describe(const JobProgram& job, const JobGroups& groups, int64_t rank,
                     const ProgramCall& call) {
  return fmt::format("rank {}: {}", rank,
                     describe(call, program_of(job, rank).groups[call.group].name,
                              groups.ranks_of(rank, call.group)));
}

}  // namespace lockstep
