#include "lockstep/program/train_audit.h"

#include <algorithm>
#include <chrono>
#include <map>

#include "lockstep/core/check.h"
#include "lockstep/core/counted.h"
#include "lockstep/datasets/unfinished_file.h"
#include "lockstep/planner/audit_plan.h"
#include "lockstep/training/run_files.h"

namespace lockstep {
namespace {

constexpr size_t kMostTold = 10;

/// "equal: `a` on 4 ranks": a line for each parameter.
std::string audit_summary(const AuditReport& report, double milliseconds) {
  std::map<std::string, int64_t> ranks_of;
  for (const AuditedRank& rank : report.ranks)
    for (const AuditedParameter& param : rank.parameters) ++ranks_of[param.name];
  std::string text;
  for (const auto& [name, ranks] : ranks_of)
    text += fmt::format("audit: equal: `{}` on {}\n", name, counted(ranks, "rank"));
  return text + fmt::format("audit: {} on {}, all as expected, measured in {:.1f} ms",
                            counted(static_cast<int64_t>(ranks_of.size()), "parameter"),
                            counted(report.world_size, "rank"), milliseconds);
}

}  // namespace

std::string audit_gradients(Trainer& trainer, const std::string& output,
                            const ParallelState& state) {
  const auto begin = std::chrono::steady_clock::now();
  const AuditReport measured = trainer.audit();
  const std::chrono::duration<double, std::milli> taken = std::chrono::steady_clock::now() - begin;
  std::vector<std::string> wrong =
      audit_differences(plan_audit(trainer.config(), state.world_size()), measured);
  const std::string path = output.empty() ? "" : run_files(output).audit;
  if (state.rank() == 0 && !path.empty()) write_output_file(path, to_json(measured));
  const size_t count = wrong.size();
  wrong.resize(std::min(count, kMostTold));
  require<UsageError>(count == 0, "audit: {} between the expected and the measured audit: {}",
                      counted(static_cast<int64_t>(count), "difference"), fmt::join(wrong, "; "));
  return audit_summary(measured, taken.count()) + (path.empty() ? "" : "; wrote " + path);
}

}  // namespace lockstep
