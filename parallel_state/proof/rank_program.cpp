#include "lockstep/parallel_state/rank_program.h"

#include <algorithm>

#include "lockstep/core/check.h"

namespace lockstep {
namespace {

using OperationKind = CollectiveOperation::Kind;

std::string operation_text(const CollectiveOperation& operation, const RankList& ranks) {
  const auto rank_at = [&](int64_t position) { return ranks.at(static_cast<size_t>(position)); };
  switch (operation.kind) {
    case OperationKind::send:
      return fmt::format("send to rank {}", rank_at(operation.position));
    case OperationKind::receive:
      return fmt::format("receive from rank {}", rank_at(operation.position));
    default:
      return to_string(operation);
  }
}

}  // namespace

bool ProgramCall::is_message() const {
  return operation.kind == OperationKind::send || operation.kind == OperationKind::receive;
}

int64_t RankProgram::num_operations() const {
  return std::count_if(events.begin(), events.end(), [](const ProgramEvent& event) {
    return event.kind == ProgramEvent::Kind::start;
  });
}

std::string describe(const ProgramCall& call, const std::string& group, const RankList& ranks) {
  const std::string count =
      call.numel < 0 ? call.dtype : fmt::format("{} x {}", call.numel, call.dtype);
  return fmt::format("{} of {}, {} over {}", operation_text(call.operation, ranks), call.label,
                     count, group_text(group, ranks));
}

std::string group_text(const std::string& name, const RankList& ranks) {
  constexpr size_t kMostListed = 16;
  if (ranks.size() <= kMostListed) return fmt::format("{} {}", name, ranks);
  return fmt::format("{} [{}, ... {} ranks ... {}]", name, ranks.front(), ranks.size(),
                     ranks.back());
}

}  // namespace lockstep
