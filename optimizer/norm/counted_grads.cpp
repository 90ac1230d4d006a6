#include "lockstep/optimizer/counted_grads.h"

#include <algorithm>
#include <limits>
#include <map>
#include <set>
#include <string>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/distributed/owned_grads.h"
#include "lockstep/distributed/parameter_check.h"
#include "lockstep/distributed/step_access.h"
#include "lockstep/kernels/sum_of_squares.h"
#include "lockstep/parallel_state/axis_groups.h"
#include "lockstep/parallel_state/piece_places.h"

namespace lockstep {
namespace {

/// Decides which parameters count, going through the models of a rank in order.
class Counter {
 public:
  explicit Counter(const ParallelState& state) : state_(state) {}

  bool counts(const ParamDescription& description) {
    const auto& tie = description.tie;
    const bool first_copy = !tie || seen_.emplace(tie->stages, tie->name).second;
    return first_copy && is_first_holder(description, state_.grids(), state_.rank());
  }

 private:
  const ParallelState& state_;
  std::set<std::pair<TiedStages, std::string>> seen_;
};

/// Whether each parameter counts, in the order of registration, which decides among copies.
std::vector<bool> counted_params(const ParamAndGradBuffer& buffer, Counter& counter) {
  std::vector<bool> counts;
  for (const NamedParameter& param : buffer.params())
    counts.push_back(counter.counts(param.description));
  return counts;
}

using PiecePlaces = std::map<std::string, PiecePlace>;

/// Those of the parameters of `model` that have rows of padding. Collective as piece_places().
PiecePlaces padded_places(const DistributedDataParallel& model, const char* caller) {
  std::vector<NamedParameter> padded;
  for (const auto& buffer : model.buffers())
    for (const NamedParameter& param : buffer->params())
      if (param.description.unpadded_rows && param.tensor.dim() > 0) padded.push_back(param);
  return piece_places(padded, model.parallel_state(), caller);
}

/// The elements of this rank's piece of a parameter that come before its rows of padding. Without
/// its place, all.
int64_t unpadded_numel(const NamedParameter& param, const PiecePlaces& places) {
  const int64_t numel = param.tensor.numel();
  const auto place = places.find(param.name);
  if (place == places.end() || numel == 0) return numel;
  const int64_t rows = param.tensor.size(0);
  const int64_t left = *param.description.unpadded_rows - place->second.start.front();
  return std::clamp<int64_t>(left, 0, rows) * (numel / rows);
}

/// Where the counted elements of each parameter end, by buffer.
std::map<const ParamAndGradBuffer*, std::vector<int64_t>> ends_in(
    const std::vector<DistributedDataParallel*>& models, Gaps gaps, const char* caller) {
  std::map<const ParamAndGradBuffer*, std::vector<int64_t>> ends;
  for (const DistributedDataParallel* model : models) {
    PiecePlaces padded;
    if (gaps == Gaps::excluded_with_padding) padded = padded_places(*model, caller);
    for (const auto& buffer : model->buffers())
      for (size_t i = 0; i < buffer->params().size(); ++i)
        ends[buffer].push_back(buffer->layout().slots[i].start +
                               unpadded_numel(buffer->params()[i], padded));
  }
  return ends;
}

/// Calls `visit` with the ranges of `buffer` whose parameters are `chosen`; these end at `ends`.
template <class Visit>
void visit_ranges(const ParamAndGradBuffer& buffer, Gaps gaps, const std::vector<int64_t>& ends,
                  const std::vector<bool>& chosen, Visit visit) {
  ElementRange range;
  bool open = false;
  for (const ParamLayout::Bucket& bucket : buffer.layout().buckets)
    for (const int64_t index : bucket.params) {
      const auto& slot = buffer.layout().slots[static_cast<size_t>(index)];
      const int64_t end = ends[static_cast<size_t>(index)];
      const bool counted = chosen[static_cast<size_t>(index)] && end > slot.start;
      const bool extends = gaps == Gaps::included || slot.start == range.end;
      if (open && !(counted && extends)) {
        visit(range);
        open = false;
      }
      if (!counted) continue;
      if (!open) range.start = slot.start;
      range.end = end;
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
  for (const DistributedDataParallel* model : models)
    detail::StepAccess::require_final_gradients(*model, caller);
}

/// The groups over which ranks combine the classes of gradients.
std::vector<GroupKind> groups_of_classes(const DistributedDataParallel& model) {
  const ParallelState& state = model.parallel_state();
  return norm_groups(state.grids(), state.rank(), model.is_sharded());
}

/// Calls `visit` with each buffer and the list that it belongs to.
template <class List, class Visit>
void visit_buffers(const std::vector<DistributedDataParallel*>& models, std::vector<List>& classes,
                   Visit visit) {
  const std::vector<GroupKind> groups = groups_of_classes(*models.front());
  classes.resize(groups.size());
  for (const DistributedDataParallel* model : models)
    for (const auto& buffer : model->buffers()) {
      const GroupKind own = model_ranks(buffer->params().front().description);
      const auto found = std::find(groups.begin(), groups.end(), own);
      visit(*buffer, classes[found == groups.end() ? 0 : found - groups.begin()]);
    }
}

void add(std::vector<at::Tensor>& list, std::vector<at::Tensor> pieces) {
  for (at::Tensor& piece : pieces) list.push_back(std::move(piece));
}

}  // namespace

CountedRanges::CountedRanges(const std::vector<DistributedDataParallel*>& models, Gaps gaps,
                             const char* caller, const std::vector<bool>& chosen)
    : models_(models) {
  check_models(models, caller);
  const ParallelState& state = models.front()->parallel_state();
  Counter counter(state);
  const auto ends = ends_in(models, gaps, caller);
  size_t first = 0;  // where the buffer's parameters begin in `chosen`
  using Places = std::pair<std::vector<Place>, std::vector<Place>>;
  std::vector<Places> classes;
  visit_buffers(models, classes, [&](const ParamAndGradBuffer& buffer, Places& places) {
    std::vector<bool> counted = counted_params(buffer, counter);
    for (auto* const list : {&places.first, &places.second}) {
      std::vector<bool> listed = counted;
      for (size_t i = 0; i < listed.size() && !chosen.empty(); ++i)
        listed[i] = listed[i] && chosen[first + i];
      visit_ranges(buffer, gaps, ends.at(&buffer), listed, [&](const ElementRange& range) {
        list->push_back({&buffer, range});
      });
      counted.flip();
    }
    first += counted.size();
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
  const std::vector<GroupKind> groups = groups_of_classes(*models.front());
  at::Tensor total = reduced(groups[0], of_class[0]);  // first, on all ranks
  for (size_t i = 1; i < groups.size(); ++i) {
    const at::Tensor more = reduced(groups[i], of_class[i]);
    total = op == ReduceOp::max ? at::maximum(total, more) : total + more;
  }
  return total;
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
  if (flat.scalar_type() != at::kDouble) return sum_of_squares(flat);  // this cannot overflow
  if (flat.numel() == 0) return at::zeros({}, flat.options());
  return at::linalg_vector_norm(flat, std::numeric_limits<double>::infinity());
}

std::vector<at::Tensor> cache_sized_parts(const at::Tensor& flat) {
  constexpr int64_t kElements = 1 << 16;
  if (!flat.is_cpu()) return {flat};
  return flat.split(kElements);
}

}  // namespace lockstep
