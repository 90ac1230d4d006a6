#include "lockstep/parallel_state/job_program.h"

#include <algorithm>
#include <map>
#include <set>
#include <unordered_map>

#include "lockstep/core/check.h"
#include "lockstep/core/text_digest.h"

namespace lockstep {
namespace {

constexpr uint32_t kNone = UINT32_MAX;

int64_t position_in(const RankList& ranks, int64_t rank) {
  const auto found = std::find(ranks.begin(), ranks.end(), rank);
  return found == ranks.end() ? -1 : found - ranks.begin();
}

/// Which groups of `program` carry messages or exchanges.
std::vector<bool> groups_with_messages(const RankProgram& program) {
  std::vector<bool> result(program.groups.size());
  for (const ProgramCall& call : program.calls)
    if (call.is_message() || call.operation.kind == CollectiveOperation::Kind::exchange)
      result[call.group] = true;
  return result;
}

}  // namespace

int64_t JobProgram::num_operations() const {
  std::vector<int64_t> of_program;
  for (const RankProgram& program : programs) of_program.push_back(program.num_operations());
  int64_t sum = 0;
  for (const uint32_t program : program_of) sum += of_program[program];
  return sum;
}

/// Finds the group of a rank that corresponds to a group of the recorded rank.
class JobGroups::Finder {
 public:
  explicit Finder(const JobProgram& job) : job_(job) {
    if (job.grids) {
      for (const GroupKind kind : all_group_kinds()) add(to_string(kind), job.grids->groups(kind));
      for (size_t level = 0; level < job.grids->sizes().hierarchical_context.size(); ++level)
        add("cp-level-" + std::to_string(level), job.grids->context_level(level));
      RankList all(static_cast<size_t>(job.world_size()));
      for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<int64_t>(i);
      world_ = std::move(all);
    }
    std::vector<int64_t> ranks(job.programs.size());
    for (const uint32_t program : job.program_of) ++ranks[program];
    for (size_t p = 0; p < job.programs.size(); ++p) {
      const auto recorded = static_cast<size_t>(job.programs[p].rank);
      const bool is_own = ranks[p] == 1 && job.program_of.at(recorded) == p;
      for (const ProgramGroup& group : job.programs[p].groups)
        rules_[p].push_back(is_own ? Rule() : rule(job.programs[p], group));
    }
  }

  RankList ranks(int64_t rank, uint32_t program, uint32_t group) const {
    const Rule& rule = rules_.at(program)[group];
    const ProgramGroup& recorded = job_.programs[program].groups[group];
    switch (rule.way) {
      case Rule::Way::recorded:
        return recorded.ranks;
      case Rule::Way::world:
        return world_;
      case Rule::Way::kind: {
        const auto index = kinds_[rule.kind].groups.index_of(rank);
        return index ? kinds_[rule.kind].groups.group(*index) : RankList();
      }
      case Rule::Way::part: {
        const RankList whole =
            kinds_[rule.kind].groups.group(*kinds_[rule.kind].groups.index_of(rank));
        RankList part;
        for (const int64_t position : rule.positions)
          part.push_back(whole[static_cast<size_t>(position)]);
        return part;
      }
    }
    return {};
  }

  /// Equal only for equal lists; unset if the list itself must be compared.
  std::optional<uint64_t> key(int64_t rank, uint32_t program, uint32_t group) const {
    const Rule& rule = rules_.at(program)[group];
    if (rule.way == Rule::Way::world) return 0;
    if (rule.way != Rule::Way::kind) return std::nullopt;
    const auto index = kinds_[rule.kind].groups.index_of(rank);
    if (!index) return std::nullopt;
    return (static_cast<uint64_t>(rule.kind + 1) << 40) + static_cast<uint64_t>(*index);
  }

 private:
  struct Kind {
    std::string name;
    RankGroups groups;
  };
  struct Rule {
    enum class Way { recorded, world, kind, part };
    Way way = Way::recorded;
    size_t kind = 0;
    std::vector<int64_t> positions = {};
  };

  void add(std::string name, RankGroups groups) {
    if (groups.count() > 0) kinds_.push_back({std::move(name), std::move(groups)});
  }

  RankList group_of(size_t kind, int64_t rank) const {
    const auto index = kinds_[kind].groups.index_of(rank);
    return index ? kinds_[kind].groups.group(*index) : RankList();
  }

  Rule rule(const RankProgram& program, const ProgramGroup& group) const {
    require<UsageError>(job_.grids.has_value(),
                        "JobProgram: several ranks share a program, but there are no grids");
    if (group.ranks.size() == world_.size() && group.ranks == world_) return {Rule::Way::world};
    const auto is = [&](size_t kind) { return group_of(kind, program.rank) == group.ranks; };
    const std::string name = group.name.substr(0, group.name.find(' '));
    for (const bool by_name : {true, false})
      for (size_t kind = 0; kind < kinds_.size(); ++kind)
        if ((!by_name || kinds_[kind].name == name) &&
            kinds_[kind].groups.size() == static_cast<int64_t>(group.ranks.size()) && is(kind))
          return {Rule::Way::kind, kind};
    std::optional<Rule> best;
    int64_t least = 0;
    for (size_t kind = 0; kind < kinds_.size(); ++kind) {
      const RankList whole = group_of(kind, program.rank);
      Rule part = {Rule::Way::part, kind};
      for (const int64_t rank : group.ranks) part.positions.push_back(position_in(whole, rank));
      const bool holds =
          std::find(part.positions.begin(), part.positions.end(), -1) == part.positions.end();
      if (!holds || (best && least <= kinds_[kind].groups.size())) continue;
      least = kinds_[kind].groups.size();
      best = part;
    }
    require<UsageError>(best.has_value(),
                        "group {}: several ranks share the program of rank {}, but no kind of "
                        "group holds its ranks; give each rank a program of its own",
                        group_text(group.name, group.ranks), program.rank);
    return *best;
  }

  const JobProgram& job_;
  std::vector<Kind> kinds_;
  RankList world_;
  std::map<size_t, std::vector<Rule>> rules_;
};

JobGroups::JobGroups(const JobProgram& job) {
  find_instances(job);
  check_positions(job);
  find_absence();
  if (!absence_) refine(job);
}

const RankList& JobGroups::ranks_of(int64_t rank, uint32_t group) const {
  return instances_[instance_of_[static_cast<size_t>(rank)][group]].ranks;
}

void JobGroups::find_instances(const JobProgram& job) {
  const Finder finder(job);
  std::map<std::string, uint32_t> numbers;  // by ProgramGroup::apart
  std::map<std::pair<uint32_t, uint64_t>, uint32_t> by_key;
  std::unordered_map<uint64_t, std::vector<uint32_t>> by_list;
  std::vector<uint32_t> apart_of;
  std::vector<std::vector<uint32_t>> apart(job.programs.size());
  std::vector<std::vector<bool>> with_messages;
  for (size_t p = 0; p < job.programs.size(); ++p) {
    for (const ProgramGroup& group : job.programs[p].groups)
      apart[p].push_back(
          numbers.try_emplace(group.apart, static_cast<uint32_t>(numbers.size())).first->second);
    with_messages.push_back(groups_with_messages(job.programs[p]));
  }
  const auto instance = [&](RankList ranks, uint32_t number) {
    uint64_t digest = digest_with(kDigestStart, number);
    for (const int64_t rank : ranks) digest = digest_with(digest, static_cast<uint64_t>(rank));
    for (const uint32_t known : by_list[digest])
      if (apart_of[known] == number && instances_[known].ranks == ranks) return known;
    const auto made = static_cast<uint32_t>(instances_.size());
    by_list[digest].push_back(made);
    apart_of.push_back(number);
    ordered_.push_back(false);
    const size_t size = ranks.size();
    instances_.push_back({std::move(ranks), std::vector<int32_t>(size, -1)});
    return made;
  };
  instance_of_.resize(job.program_of.size());
  for (size_t rank = 0; rank < job.program_of.size(); ++rank) {
    const uint32_t program = job.program_of[rank];
    const auto own = static_cast<int64_t>(rank);
    for (uint32_t group = 0; group < job.programs[program].groups.size(); ++group) {
      const uint32_t number = apart[program][group];
      uint32_t found = kNone;
      if (const auto key = finder.key(own, program, group)) {
        auto& slot = by_key.try_emplace({number, *key}, kNone).first->second;
        if (slot == kNone) slot = instance(finder.ranks(own, program, group), number);
        found = slot;
      } else {
        found = instance(finder.ranks(own, program, group), number);
      }
      instance_of_[rank].push_back(found);
      if (with_messages[program][group]) ordered_[found] = true;
    }
  }
  for (Instance& one : instances_)
    for (size_t i = 0; i < one.ranks.size(); ++i) {
      const auto& list = instance_of_.at(static_cast<size_t>(one.ranks[i]));
      const auto index = static_cast<uint32_t>(&one - instances_.data());
      const auto group = std::find(list.begin(), list.end(), index);
      if (group != list.end()) one.group_of[i] = static_cast<int32_t>(group - list.begin());
    }
}

void JobGroups::check_positions(const JobProgram& job) const {
  std::vector<std::set<uint32_t>> with_messages;
  for (const RankProgram& program : job.programs) {
    with_messages.emplace_back();
    for (const ProgramCall& call : program.calls)
      if (call.is_message()) with_messages.back().insert(call.group);
  }
  for (size_t rank = 0; rank < instance_of_.size(); ++rank) {
    const RankProgram& program = job.programs[job.program_of[rank]];
    for (const uint32_t group : with_messages[job.program_of[rank]]) {
      const RankList& ranks = instances_[instance_of_[rank][group]].ranks;
      const int64_t position = position_in(ranks, static_cast<int64_t>(rank));
      require<UsageError>(position == program.groups[group].position,
                          "ranks {} and {} share a program, but stand at positions {} and {} of "
                          "their groups {}, in which it sends messages",
                          program.rank, rank, program.groups[group].position, position,
                          program.groups[group].name);
    }
  }
}

void JobGroups::find_absence() {
  for (const Instance& one : instances_)
    for (size_t i = 0; i < one.ranks.size(); ++i) {
      if (one.group_of[i] >= 0) continue;
      for (size_t k = 0; k < one.ranks.size() && !absence_; ++k)
        if (one.group_of[k] >= 0)
          absence_ = {one.ranks[i], one.ranks[k], static_cast<uint32_t>(one.group_of[k])};
      return;
    }
}

std::vector<uint32_t> JobGroups::orbit_of_instances() {
  std::map<std::pair<bool, std::vector<Member>>, uint32_t> known;
  std::vector<uint32_t> orbit_of;
  orbits_.clear();
  for (size_t i = 0; i < instances_.size(); ++i) {
    const Instance& one = instances_[i];
    std::vector<Member> sequence;
    for (size_t k = 0; k < one.ranks.size(); ++k)
      sequence.push_back(
          {class_of_[static_cast<size_t>(one.ranks[k])], static_cast<uint32_t>(one.group_of[k])});
    std::vector<Member> members = sequence;
    std::sort(members.begin(), members.end());
    members.erase(std::unique(members.begin(), members.end()), members.end());
    const auto [entry, is_new] = known.try_emplace({ordered_[i], ordered_[i] ? sequence : members},
                                                   static_cast<uint32_t>(orbits_.size()));
    orbit_of.push_back(entry->second);
    if (!is_new) continue;
    Orbit orbit{one.ranks, std::move(members), {}, {}};
    if (ordered_[i]) orbit.by_position = std::move(sequence);
    std::set<uint32_t> classes;
    for (const Member& member : orbit.members) classes.insert(member.rank_class);
    orbit.rank_classes.assign(classes.begin(), classes.end());
    orbits_.push_back(std::move(orbit));
  }
  return orbit_of;
}

void JobGroups::refine(const JobProgram& job) {
  class_of_ = job.program_of;
  for (size_t classes = 0;;) {
    const std::vector<uint32_t> orbit_of = orbit_of_instances();
    std::map<std::vector<uint32_t>, uint32_t> known;
    std::vector<uint32_t> refined;
    for (size_t rank = 0; rank < class_of_.size(); ++rank) {
      std::vector<uint32_t> key = {class_of_[rank]};
      for (const uint32_t instance : instance_of_[rank]) key.push_back(orbit_of[instance]);
      refined.push_back(
          known.try_emplace(std::move(key), static_cast<uint32_t>(known.size())).first->second);
    }
    class_of_ = std::move(refined);
    if (known.size() == classes) return number_classes(job, orbit_of_instances());
    classes = known.size();
  }
}

void JobGroups::number_classes(const JobProgram& job, const std::vector<uint32_t>& orbit_of) {
  for (size_t rank = 0; rank < class_of_.size(); ++rank) {
    if (class_of_[rank] < classes_.size()) continue;
    RankClass made{job.program_of[rank], static_cast<int64_t>(rank), {}};
    for (const uint32_t instance : instance_of_[rank]) made.orbits.push_back(orbit_of[instance]);
    classes_.push_back(std::move(made));
  }
}

}  // namespace lockstep
