#include "lockstep/optimizer/counted_grads.h"

#include <limits>
#include <set>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/distributed/owned_grads.h"
#include "lockstep/distributed/parameter_check.h"
#include "lockstep/kernels/sum_of_squares.h"

namespace lockstep {
namespace {

/// Whether this rank is the first of its group; false if it is in none.
bool is_first(const ParallelState& state, GroupKind kind) {
  const RankList ranks = state.grids().group_of(kind, state.rank());
  return !ranks.empty() && ranks.front() == state.rank();
}

/// Decides which parameters count, going through the models of a rank in order.
class Counter {
 public:
  explicit Counter(const ParallelState& state)
      : state_(state),
        first_tp_(is_first(state, GroupKind::tp)),
        first_etp_(is_first(state, GroupKind::expert_tp)),
        first_ep_(is_first(state, GroupKind::ep)),
        first_pp_(is_first(state, GroupKind::pp)) {}

  bool counts(const ParamDescription& description) {
    using enum MeshAxis;
    const auto along = [&](MeshAxis axis, bool first) {
      return first || std::holds_alternative<Shard>(description.placement(axis));
    };
    const bool in_its_grid = description.is_expert ? along(etp, first_etp_) && along(ep, first_ep_)
                                                   : along(tp, first_tp_);
    if (description.tie) {
      const auto& [name, stages] = *description.tie;
      const bool first_copy = seen_.emplace(stages, name).second;
      return first_copy && in_its_grid && is_first(state_, tie_group_kind(stages));
    }
    const bool on_all_stages = description.gradient_state(pp) != GradientState::complete;
    return in_its_grid && (!on_all_stages || first_pp_);
  }

 private:
  const ParallelState& state_;
  bool first_tp_, first_etp_, first_ep_, first_pp_;
  std::set<std::pair<TiedStages, std::string>> seen_;
};

/// Whether each parameter counts, in the order of registration, in which copies are told apart.
std::vector<bool> counted_params(const ParamAndGradBuffer& buffer, Counter& counter) {
  std::vector<bool> counts;
  for (const NamedParameter& param : buffer.params())
    counts.push_back(counter.counts(param.description));
  return counts;
}

/// Gives `visit` the ranges of `buffer` whose parameters are `chosen`.
template <class Visit>
void visit_ranges(const ParamAndGradBuffer& buffer, Gaps gaps, const std::vector<bool>& chosen,
                  Visit visit) {
  ElementRange range;
  bool open = false;
  for (const ParamLayout::Bucket& bucket : buffer.layout().buckets)
    for (const int64_t index : bucket.params) {
      const auto& slot = buffer.layout().slots[static_cast<size_t>(index)];
      const bool counted = chosen[static_cast<size_t>(index)];
      const bool extends = gaps == Gaps::included || slot.start == range.end;
      if (open && !(counted && extends)) {
        visit(range);
        open = false;
      }
      if (!counted) continue;
      if (!open) range.start = slot.start;
      range.end = slot.end;
      open = true;
    }
  if (open) visit(range);
}

void check_models(const std::vector<DistributedDataParallel*>& models, const char* caller) {
  check_model_list(models, caller);
  for (const DistributedDataParallel* model : models)
    require<UsageError>(model->is_sharded() == models.front()->is_sharded(),
                        "{}: found models with and without ddp.use_distributed_optimizer, allowed: "
                        "one of the two",
                        caller);
}

void check_gradients(const std::vector<DistributedDataParallel*>& models, const char* caller) {
  for (const DistributedDataParallel* model : models) model->require_final_gradients(caller);
}

/// 2 where what ranks have of experts is put together over other ranks than the rest.
size_t num_classes(const DistributedDataParallel& model) {
  const ParallelState& state = model.parallel_state();
  const auto ranks = [&](GroupKind kind) { return state.grids().group_of(kind, state.rank()); };
  return model.is_sharded() || ranks(GroupKind::tp_pp) == ranks(GroupKind::tp_ep_pp) ? 1 : 2;
}

/// Gives `visit` each buffer and the list that it belongs to.
template <class List, class Visit>
void visit_buffers(const std::vector<DistributedDataParallel*>& models, std::vector<List>& classes,
                   Visit visit) {
  classes.resize(num_classes(*models.front()));
  for (const DistributedDataParallel* model : models)
    for (const auto& buffer : model->buffers())
      visit(*buffer,
            buffer->params().front().description.is_expert ? classes.back() : classes.front());
}

void add(std::vector<at::Tensor>& list, std::vector<at::Tensor> pieces) {
  for (at::Tensor& piece : pieces) list.push_back(std::move(piece));
}

}  // namespace

CountedRanges::CountedRanges(const std::vector<DistributedDataParallel*>& models, Gaps gaps,
                             const char* caller)
    : models_(models) {
  check_models(models, caller);
  Counter counter(models.front()->parallel_state());
  using Places = std::pair<std::vector<Place>, std::vector<Place>>;
  std::vector<Places> classes;
  visit_buffers(models, classes, [&](const ParamAndGradBuffer& buffer, Places& places) {
    std::vector<bool> chosen = counted_params(buffer, counter);
    for (auto* const list : {&places.first, &places.second}) {
      visit_ranges(buffer, gaps, chosen, [&](const ElementRange& range) {
        list->push_back({&buffer, range});
      });
      chosen.flip();
    }
  });
  for (auto& [here, elsewhere] : classes) {
    classes_.push_back(std::move(here));
    elsewhere_.push_back(std::move(elsewhere));
  }
}

PieceClasses CountedRanges::grads(const char* caller) const {
  check_gradients(models_, caller);
  return grads_of(classes_);
}

PieceClasses CountedRanges::grads_counted_elsewhere() const { return grads_of(elsewhere_); }

PieceClasses CountedRanges::grads_of(const PlaceClasses& classes) {
  PieceClasses pieces;
  for (const auto& places : classes) {
    pieces.emplace_back();
    for (const auto& [buffer, range] : places) add(pieces.back(), owned_grads(*buffer, range));
  }
  return pieces;
}

PieceClasses held_grads(const std::vector<DistributedDataParallel*>& models, const char* caller) {
  check_models(models, caller);
  check_gradients(models, caller);
  PieceClasses classes;
  visit_buffers(models, classes, [](const ParamAndGradBuffer& buffer, auto& list) {
    add(list, reduced_grads(buffer));
  });
  return classes;
}

at::Tensor combine_over_model(const std::vector<DistributedDataParallel*>& models,
                              const std::vector<at::Tensor>& of_class, ReduceOp op,
                              const char* label) {
  const ParallelState& state = models.front()->parallel_state();
  const auto reduced = [&](GroupKind kind, const at::Tensor& value) {
    if (state.grids().size(kind) > 1) all_reduce(state.group(kind), value, op, label).wait();
    return value;
  };
  if (models.front()->is_sharded()) return reduced(GroupKind::intra_optimizer, of_class[0]);
  at::Tensor dense = reduced(GroupKind::tp_pp, of_class[0]);  // first, on all ranks
  if (of_class.size() == 1) return dense;
  const at::Tensor expert = reduced(GroupKind::tp_ep_pp, of_class[1]);
  return op == ReduceOp::max ? at::maximum(dense, expert) : dense + expert;
}

at::Tensor sum_of_squares(const at::Tensor& flat) {
  if (flat.is_complex()) return sum_of_squares(at::view_as_real(flat).view({-1}));
  if (flat.scalar_type() != at::kHalf) return kernels::sum_of_squares(flat);
  at::Tensor total = at::zeros({}, flat.options().dtype(at::kDouble));
  for (const at::Tensor& part : cache_sized_parts(flat))
    total += kernels::sum_of_squares(part.to(at::kFloat));
  return total;
}

at::Tensor finite_mark(const at::Tensor& flat) {
  if (flat.scalar_type() != at::kDouble) return sum_of_squares(flat);  // which cannot overflow
  if (flat.numel() == 0) return at::zeros({}, flat.options());
  return at::linalg_vector_norm(flat, std::numeric_limits<double>::infinity());
}

std::vector<at::Tensor> cache_sized_parts(const at::Tensor& flat) {
  constexpr int64_t kElements = 1 << 16;
  if (!flat.is_cpu()) return {flat};
  return flat.split(kElements);
}

}  // namespace lockstep
