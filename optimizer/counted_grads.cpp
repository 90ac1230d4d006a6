#include "lockstep/optimizer/counted_grads.h"

#include <set>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/distributed/owned_grads.h"
#include "lockstep/kernels/sum_of_squares.h"

namespace lockstep {
namespace {

GroupKind group_kind(TiedStages stages) {
  switch (stages) {
    case TiedStages::all:
      return GroupKind::pp;
    case TiedStages::first_and_last:
      return GroupKind::embedding;
    default:
      return GroupKind::position_embedding;
  }
}

/// Decides which parameters count, going through the models of a rank in order.
class Counter {
 public:
  explicit Counter(const ParallelState& state) : grids_(state.grids()), rank_(state.rank()) {}

  bool counts(const ParamDescription& description) {
    using enum MeshAxis;
    const auto counts_along = [&](MeshAxis axis, GroupKind kind) {
      return std::holds_alternative<Shard>(description.placement(axis)) || first_of(kind);
    };
    const bool in_its_grid = description.is_expert ? counts_along(etp, GroupKind::expert_tp) &&
                                                         counts_along(ep, GroupKind::ep)
                                                   : counts_along(tp, GroupKind::tp);
    if (description.tie) {
      const auto& [name, stages] = *description.tie;
      return seen_.emplace(stages, name).second && first_of(group_kind(stages)) && in_its_grid;
    }
    const bool on_all_stages = description.gradient_state(pp) != GradientState::complete;
    return in_its_grid && (!on_all_stages || first_of(GroupKind::pp));
  }

 private:
  bool first_of(GroupKind kind) const {
    if (grids_.size(kind) == 1) return true;
    const RankList ranks = grids_.group_of(kind, rank_);
    return !ranks.empty() && ranks.front() == rank_;
  }

  const RankGrids& grids_;
  int64_t rank_;
  std::set<std::pair<TiedStages, std::string>> seen_;
};

void add_counted(const ParamAndGradBuffer& buffer, Gaps gaps, Counter& counter,
                 std::vector<at::Tensor>& out) {
  std::vector<bool> counts;  // in the order of registration, in which copies are told apart
  for (const NamedParameter& param : buffer.params())
    counts.push_back(counter.counts(param.description));
  ElementRange range;
  const auto add_range = [&] {
    for (at::Tensor& piece : owned_grads(buffer, range)) out.push_back(std::move(piece));
  };
  bool open = false;
  for (const ParamLayout::Bucket& bucket : buffer.layout().buckets)
    for (const int64_t index : bucket.params) {
      const auto& slot = buffer.layout().slots[static_cast<size_t>(index)];
      const bool counted = counts[static_cast<size_t>(index)];
      const bool extends = gaps == Gaps::included || slot.start == range.end;
      if (open && !(counted && extends)) {
        add_range();
        open = false;
      }
      if (!counted) continue;
      if (!open) range.start = slot.start;
      range.end = slot.end;
      open = true;
    }
  if (open) add_range();
}

void check_models(const std::vector<DistributedDataParallel*>& models, const char* caller) {
  require<UsageError>(!models.empty(), "{}: no model was given", caller);
  for (const DistributedDataParallel* model : models) {
    model->require_final_gradients(caller);
    require<UsageError>(model->is_sharded() == models.front()->is_sharded(),
                        "{}: found models with and without ddp.use_distributed_optimizer, allowed: "
                        "one of the two",
                        caller);
  }
}

template <class AddBuffer>
GradPieces collect(const std::vector<DistributedDataParallel*>& models, AddBuffer add_buffer) {
  GradPieces pieces;
  for (const DistributedDataParallel* model : models)
    for (const auto& buffer : model->buffers())
      add_buffer(*buffer,
                 buffer->params().front().description.is_expert ? pieces.expert : pieces.dense);
  return pieces;
}

}  // namespace

GradPieces counted_grads(const std::vector<DistributedDataParallel*>& models, Gaps gaps,
                         const char* caller) {
  check_models(models, caller);
  Counter counter(models.front()->parallel_state());
  return collect(models, [&](const ParamAndGradBuffer& buffer, std::vector<at::Tensor>& out) {
    add_counted(buffer, gaps, counter, out);
  });
}

GradPieces held_grads(const std::vector<DistributedDataParallel*>& models, const char* caller) {
  check_models(models, caller);
  return collect(models, [](const ParamAndGradBuffer& buffer, std::vector<at::Tensor>& out) {
    for (at::Tensor& piece : owned_grads(buffer)) out.push_back(std::move(piece));
  });
}

at::Tensor combine_over_model(const std::vector<DistributedDataParallel*>& models,
                              const at::Tensor& dense, const at::Tensor& expert, ReduceOp op,
                              const char* label) {
  const ParallelState& state = models.front()->parallel_state();
  const auto both = [&](const at::Tensor& a, const at::Tensor& b) {
    return op == ReduceOp::max ? at::maximum(a, b) : a + b;
  };
  const auto reduced = [&](GroupKind kind, const at::Tensor& value) {
    if (state.grids().size(kind) > 1) all_reduce(state.group(kind), value, op, label).wait();
    return value;
  };
  if (models.front()->is_sharded()) return reduced(GroupKind::intra_optimizer, both(dense, expert));
  const auto ranks = [&](GroupKind kind) { return state.grids().group_of(kind, state.rank()); };
  if (ranks(GroupKind::tp_pp) == ranks(GroupKind::tp_ep_pp))
    return reduced(GroupKind::tp_pp, both(dense, expert));
  const at::Tensor all_dense = reduced(GroupKind::tp_pp, dense);  // first, on all ranks
  return both(all_dense, reduced(GroupKind::tp_ep_pp, expert));
}

at::Tensor sum_of_squares(const at::Tensor& flat) {
  if (flat.scalar_type() != at::kHalf) return kernels::sum_of_squares(flat);
  at::Tensor total = at::zeros({}, flat.options().dtype(at::kDouble));
  for (const at::Tensor& part : cache_sized_parts(flat))
    total += kernels::sum_of_squares(part.to(at::kFloat));
  return total;
}

std::vector<at::Tensor> cache_sized_parts(const at::Tensor& flat) {
  constexpr int64_t kElements = 1 << 16;
  if (!flat.is_cpu()) return {flat};
  return flat.split(kElements);
}

}  // namespace lockstep
