#include "lockstep/optimizer/audited_model.h"

#include <algorithm>
#include <map>
#include <set>

#include "lockstep/core/check.h"
#include "lockstep/core/text_fields.h"
#include "lockstep/distributed/buffer_kind.h"
#include "lockstep/distributed/model_check.h"
#include "lockstep/distributed/module_units.h"
#include "lockstep/distributed/parameter_check.h"
#include "lockstep/optimizer/expected_audit.h"
#include "lockstep/parallel_state/axis_groups.h"
#include "lockstep/parallel_state/collectives.h"
#include "lockstep/parallel_state/pipeline_position.h"

namespace lockstep {
namespace {

constexpr const char* kReportLabel = "audit";

const ParallelState& state_of(const AuditedModel& model) {
  return model.models.front()->parallel_state();
}

DescribedParameter described(const NamedParameter& param, int64_t unit) {
  return {.name = param.name,
          .shape = param.tensor.sizes().vec(),
          .description = param.description,
          .dtype = at::toString(param.tensor.scalar_type()),
          .trained = param.tensor.requires_grad(),
          .unit = unit};
}

/// Sets the groups' rates and decay of the trained parameters of all chunks.
void set_group_numbers(const AuditedModel& model, std::vector<DescribedChunk>& chunks) {
  std::vector<NamedParameter> trained;
  for (const torch::nn::Module* const module : model.modules)
    for (const NamedParameter& param : collect_parameters(*module))
      if (param.tensor.requires_grad()) trained.push_back(param);
  const GroupedParams grouped =
      group_params(trained, model.config, model.overrides, ListedParams::some);
  size_t next = 0;
  for (DescribedChunk& chunk : chunks)
    for (DescribedParameter& param : chunk.parameters) {
      if (!param.trained) continue;
      const ParamGroup& group = grouped.groups[grouped.group_of[next++]];
      param.max_lr = group.max_lr;
      param.min_lr = group.min_lr;
      param.wd_mult = group.wd_mult;
    }
}

/// The kinds of replicas for which ranks over which gradients are reduced later hold other lengths.
std::vector<GroupKind> unlike_kinds(const DescribedChunk& chunk, const ParallelState& state) {
  std::vector<GroupKind> unlike;
  for (const GroupKind kind : kReplicaKinds) {
    std::set<MeshAxis> axes;
    std::map<std::string, std::string> by_dtype;
    for (const DescribedParameter& param : chunk.parameters) {
      if (!param.trained) continue;
      const BufferKind lies_in = buffer_kind(param.description, state.grids(), MatrixLayout::cut);
      if (lies_in.replicas != kind || !lies_in.apart.empty()) continue;
      const std::vector<MeshAxis> over = partial_axes(param.description, state.grids());
      axes.insert(over.begin(), over.end());
      by_dtype[param.dtype] +=
          fmt::format("{} {}\n", fmt::join(param.shape, ","), over.empty() ? "" : param.name);
    }
    std::string text;
    for (const auto& [dtype, lines] : by_dtype) text += dtype + "\n" + lines;
    if (!same_over_axes(text, {axes.begin(), axes.end()}, state)) unlike.push_back(kind);
  }
  return unlike;
}

std::vector<DescribedChunk> described_chunks(const AuditedModel& model) {
  const ParallelState& state = state_of(model);
  const int64_t stage = PipelinePosition(state.grids(), state.rank()).stage();
  std::vector<DescribedChunk> chunks;
  for (const torch::nn::Module* const module : model.modules) {
    const std::vector<NamedParameter> params = collect_parameters(*module);
    const std::vector<int64_t> units = units_of(*module, params);
    DescribedChunk& chunk = chunks.emplace_back();
    chunk.bucketed = has_buckets(stage, static_cast<int64_t>(chunks.size()) - 1);
    for (size_t i = 0; i < params.size(); ++i)
      chunk.parameters.push_back(described(params[i], units[i]));
    chunk.unlike = unlike_kinds(chunk, state);
  }
  set_group_numbers(model, chunks);
  return chunks;
}

/// The chunks of a loop that has no Lockstep buffers.
std::vector<DescribedChunk> described_chunks(const AuditedLoop& loop) {
  std::vector<DescribedChunk> chunks(1);
  for (const NamedParameter& param : loop.parameters)
    chunks.front().parameters.push_back(described(param, /*unit=*/0));
  return chunks;
}

/// Names of the tied copies that each rank trains.
std::vector<std::multiset<std::string>> ties_of_ranks(const std::vector<DescribedChunk>& own,
                                                      const ParallelState& state) {
  std::string text;
  for (const DescribedChunk& chunk : own)
    for (const DescribedParameter& param : chunk.parameters)
      if (param.trained && param.description.tie) append_field(text, param.description.tie->name);
  std::vector<std::multiset<std::string>> ties;
  for (const std::string& of_rank : all_gather_texts(state.world(), text, kReportLabel)) {
    std::multiset<std::string>& names = ties.emplace_back();
    for (std::string_view rest = of_rank; !rest.empty();)
      names.insert(std::string(take_field(rest, kReportLabel)));
  }
  return ties;
}

/// The copies on another rank, as far as this rank has and describes them too.
std::vector<DescribedChunk> tied_copies(const std::vector<DescribedChunk>& own,
                                        const std::multiset<std::string>& names) {
  std::vector<DescribedChunk> copies(1);
  std::set<std::string> done;
  for (const DescribedChunk& chunk : own)
    for (const DescribedParameter& param : chunk.parameters)
      if (const auto& tie = param.description.tie; tie && done.insert(tie->name).second)
        for (size_t i = 0; i < names.count(tie->name); ++i)
          copies.front().parameters.push_back(param);
  return copies;
}

/// Each rank works out the report of what it has.
AuditReport expected_of_all_ranks(const ParallelState& state,
                                  const std::vector<DescribedChunk>& own, AuditSettings settings,
                                  const std::string& scaling) {
  const auto ties = ties_of_ranks(own, state);
  const auto chunks_of = [&](int64_t rank) {
    return rank == state.rank() ? own : tied_copies(own, ties[static_cast<size_t>(rank)]);
  };
  settings.knows_all_ranks = false;
  const AuditReport of_own = expected_audit(chunks_of, state.grids(), settings, {state.rank()});
  AuditReport report = report_of_all_ranks(state, scaling, of_own.ranks.front());
  set_elements(report);
  return report;
}

}  // namespace

void check_audited_model(const AuditedModel& model, const char* call) {
  check_model_list(model.models, call);
  for (DistributedDataParallel* const ddp : model.models)
    require<UsageError>(ddp->state_text() == "idle" || ddp->state_text() == "ready",
                        "{}: the state is {}, allowed: idle, ready", call, ddp->state_text());
  require<UsageError>(model.num_microbatches >= 0, "{}: num_microbatches: found {}, allowed: >= 0",
                      call, model.num_microbatches);
  require<UsageError>(!model.loss || model.num_microbatches > 0,
                      "{}: num_microbatches: found 0 beside a loss, allowed: >= 1", call);
}

AuditReport report_of_all_ranks(const ParallelState& state, const std::string& scaling,
                                const AuditedRank& own) {
  AuditReport report = {
      .world_size = state.world_size(), .layout = layout_text(state.grids()), .scaling = scaling};
  for (const std::string& text : all_gather_texts(state.world(), to_json(own), kReportLabel))
    report.ranks.push_back(parse_audited_rank(text, kReportLabel));
  return report;
}

AuditReport expected_audit(const AuditedModel& model) {
  check_model_list(model.models, "expected_audit");
  require<UsageError>(model.modules.size() == model.models.size(),
                      "expected_audit: found {} modules, allowed: as many as models, {}",
                      model.modules.size(), model.models.size());
  const AuditSettings settings = {.ddp = model.ddp,
                                  .optimizer = model.config,
                                  .own_rule = model.own_rule,
                                  .with_update = model.optimizer != nullptr};
  return expected_of_all_ranks(state_of(model), described_chunks(model), settings,
                               to_string(model.models.front()->scaling_mode()));
}

AuditReport expected_audit(const AuditedLoop& loop) {
  check_audited_loop(loop, "expected_audit");
  AuditSettings settings = {.with_update = false,
                            .with_buckets = false,
                            .with_tokens = loop.reduction == GradientReduction::per_token};
  settings.ddp.calculate_per_token_loss = loop.reduction != GradientReduction::mean;
  AuditReport report = expected_of_all_ranks(*loop.state, described_chunks(loop), settings,
                                             to_string(loop.reduction));
  for (AuditedRank& rank : report.ranks) {
    rank.zero_elements = 0;
    if (!loop.norm) rank.norm_elements = 0;
    for (AuditedParameter& param : rank.parameters) param.counted = false;
  }
  return report;
}

}  // namespace lockstep
