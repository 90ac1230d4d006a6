#include "lockstep/parallel_state/planning.h"

#include <map>

#include "lockstep/core/check.h"
#include "lockstep/parallel_state/collective_ledger.h"
#include "lockstep/parallel_state/job_program.h"
#include "lockstep/parallel_state/planned_rank.h"
#include "lockstep/parallel_state/rank_recorder.h"

namespace lockstep {
namespace {

/// The communication of the ranks of a world.
class World {
 public:
  void note(const CollectiveRecord& call) {
    if (call.kind == Kind::send)
      return messages_[{call.rank, call.peer}].sent.push_back(entry_of(call));
    if (call.kind == Kind::receive)
      return messages_[{call.peer, call.rank}].received.push_back(entry_of(call));
    auto& entries = collectives_[call.ranks][call.rank];
    entries.push_back(entry_of(call));
    entries.back().sequence = static_cast<int64_t>(entries.size());
    names_.try_emplace(call.ranks, call.group);
  }

  std::optional<std::string> difference() const {
    for (const auto& [ranks, by_rank] : collectives_) {
      std::vector<RankAccount> accounts;
      for (const int64_t rank : ranks) {
        const auto found = by_rank.find(rank);
        accounts.push_back(
            {.rank = rank,
             .answered = true,
             .entries = found == by_rank.end() ? std::vector<CollectiveEntry>() : found->second,
             .elsewhere = ""});
      }
      if (const auto text = first_difference(accounts))
        return fmt::format("group {} {}: {}", names_.at(ranks), ranks, *text);
    }
    for (const auto& [pair, messages] : messages_)
      if (const auto text = messages.difference(pair.first, pair.second)) return text;
    return std::nullopt;
  }

 private:
  using Kind = CollectiveRecord::Kind;

  /// The messages from one rank to another.
  struct Messages {
    std::vector<CollectiveEntry> sent, received;

    std::optional<std::string> difference(int64_t from, int64_t to) const {
      for (size_t i = 0; i < std::max(sent.size(), received.size()); ++i) {
        if (i < sent.size() && i < received.size() && same(sent[i], received[i])) continue;
        return fmt::format("message {} from rank {} to rank {}: {}; {}", i + 1, from, to,
                           i < sent.size() ? sent[i].to_string() : "nothing is sent",
                           i < received.size() ? received[i].to_string() : "nothing is received");
      }
      return std::nullopt;
    }
    static bool same(CollectiveEntry a, const CollectiveEntry& b) {
      a.operation = b.operation;
      return a.same_operation(b);
    }
  };

  static CollectiveEntry entry_of(const CollectiveRecord& call) {
    CollectiveEntry entry;
    entry.operation = call.operation;
    entry.label = call.label;
    entry.numel = call.kind == Kind::uneven_collective ? -1 : call.numel;
    entry.dtype = call.dtype;
    return entry;
  }

  std::map<RankList, std::map<int64_t, std::vector<CollectiveEntry>>> collectives_;
  std::map<RankList, std::string> names_;
  std::map<std::pair<int64_t, int64_t>, Messages> messages_;
};

/// Records what each rank does as a program.
class Witness {
 public:
  using Body = std::function<void(const ParallelState&)>;

  /// With `class_of` the first rank of each class represents the others.
  explicit Witness(const ParallelSizes& sizes,
                   const std::function<int64_t(int64_t rank)>& class_of = {})
      : sizes_(sizes) {
    job_.grids.emplace(sizes);
    job_.program_of.resize(static_cast<size_t>(sizes.world_size));
    std::map<int64_t, int64_t> first;
    for (int64_t rank = 0; rank < sizes.world_size; ++rank)
      represented_by_.push_back(class_of ? first.try_emplace(class_of(rank), rank).first->second
                                         : rank);
  }

  /// Runs `body` for all ranks. If some padded their texts to a length that a later one exceeded,
  /// all run once more.
  const JobProgram& run(const Body& body) {
    if (!run_once(body)) run_once(body);
    return job_;
  }

 private:
  /// Returns whether all ranks padded texts to the same lengths.
  bool run_once(const Body& body) {
    job_.programs.clear();
    const auto messages = std::make_shared<KnownMessages>(represented_by_);
    bool same_lengths = true;
    for (int64_t rank = 0; rank < sizes_.world_size; ++rank) {
      const auto place = static_cast<size_t>(rank);
      if (represented_by_[place] == rank) {
        job_.program_of[place] = static_cast<uint32_t>(job_.programs.size());
        same_lengths = run_rank(rank, body, messages) && same_lengths;
      } else {
        job_.program_of[place] = job_.program_of[static_cast<size_t>(represented_by_[place])];
      }
    }
    return same_lengths;
  }

  bool run_rank(int64_t rank, const Body& body, const std::shared_ptr<KnownMessages>& messages) {
    const auto recorder = std::make_shared<RankRecorder>(rank, text_lengths_, messages);
    try {
      body(ParallelState::planning_rank(sizes_, rank, PlannedRank{recorder}));
    } catch (const std::exception& error) {
      fail<Error>("planning rank {} of {}: {}", rank, sizes_.world_size, error.what());
    }
    text_lengths_ = recorder->text_lengths();
    job_.programs.push_back(recorder->take());
    return !recorder->texts_grew();
  }

  ParallelSizes sizes_;
  JobProgram job_;
  std::vector<int64_t> represented_by_;
  RankRecorder::TextLengths text_lengths_;
};

/// Adds the calls of a program to `world`.
void note_calls(const RankProgram& program, World& world) {
  using Kind = CollectiveOperation::Kind;
  using RecordKind = CollectiveRecord::Kind;
  const auto note = [&](const ProgramCall& call, const CollectiveOperation& operation,
                        RecordKind kind) {
    const ProgramGroup& group = program.groups[call.group];
    const bool message = kind == RecordKind::send || kind == RecordKind::receive;
    world.note({program.rank, group.name, group.ranks, to_string(operation), call.label, call.dtype,
                call.numel, call.bytes, kind,
                message ? group.ranks.at(static_cast<size_t>(operation.position)) : -1});
  };
  for (const ProgramEvent& event : program.events) {
    if (event.kind != ProgramEvent::Kind::start) continue;
    const ProgramCall& call = program.calls[event.value];
    const CollectiveOperation& called = call.operation;
    if (called.kind == Kind::comparison) continue;
    if (called.kind == Kind::exchange) {
      note(call, {.kind = Kind::send, .position = called.position}, RecordKind::send);
      note(call, {.kind = Kind::receive, .position = called.source}, RecordKind::receive);
    } else {
      note(call, called,
           called.kind == Kind::send         ? RecordKind::send
           : called.kind == Kind::receive    ? RecordKind::receive
           : called.kind == Kind::all_to_all ? RecordKind::uneven_collective
                                             : RecordKind::collective);
    }
  }
}

}  // namespace

std::optional<std::string> verify_collectives(
    const ParallelSizes& sizes, const std::function<void(const ParallelState&)>& body) {
  Witness witness(sizes);
  const JobProgram& job = witness.run(body);
  World world;
  for (const RankProgram& program : job.programs) note_calls(program, world);
  if (auto difference = world.difference()) return difference;
  const OrderVerdict verdict = prove_order(job);
  if (verdict.ok()) return std::nullopt;
  return verdict.to_string();
}

OrderVerdict verify(const std::function<void(const ParallelState&)>& program,
                    const ParallelSizes& world,
                    const std::function<int64_t(int64_t rank)>& class_of) {
  return prove_order(Witness(world, class_of).run(program));
}

}  // namespace lockstep
