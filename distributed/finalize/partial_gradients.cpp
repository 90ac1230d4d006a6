#include <algorithm>
#include <map>
#include <tuple>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/core/text_digest.h"
#include "lockstep/distributed/finalize_passes.h"
#include "lockstep/distributed/notify_on_error.h"
#include "lockstep/distributed/owned_grads.h"
#include "lockstep/distributed/parameter_check.h"
#include "lockstep/parallel_state/axis_groups.h"
#include "lockstep/parallel_state/collectives.h"

namespace lockstep {
namespace {

constexpr int64_t kPackedBytes = 1 << 20;
constexpr int64_t kInPlaceBytes = kPackedBytes / 4;

/// Gradients with the same key can go into one collective.
struct Key {
  MeshAxis axis;
  GradientState state;
  at::ScalarType dtype;
  auto operator<=>(const Key&) const = default;
};

/// Gradients of neighbouring parameters.
struct Piece {
  at::Tensor grads;
  int64_t parameters;
  const NamedParameter* first;
  int64_t bytes() const { return static_cast<int64_t>(grads.nbytes()); }
};

using Pieces = std::map<Key, std::vector<Piece>>;

/// Adds the gradients that are partial over `axis` in one bucket of `buffer`. Parameters that lie
/// side by side become one piece, except over pp, where other stages may have others between them.
void collect(const ParamAndGradBuffer& buffer, const ParamLayout::Bucket& bucket, MeshAxis axis,
             Pieces& pieces) {
  ElementRange range;
  int64_t parameters = 0;
  const NamedParameter* first = nullptr;
  auto state = GradientState::complete;
  const auto add_range = [&] {
    if (parameters > 0)
      for (const at::Tensor& grads : reduced_grads(buffer, range))
        pieces[{axis, state, grads.scalar_type()}].push_back({grads, parameters, first});
    parameters = 0;
  };
  for (const int64_t index : bucket.params) {
    const NamedParameter& param = buffer.params()[static_cast<size_t>(index)];
    const ParamDescription& description = param.description;
    if (description.gradient_states.empty()) continue;
    const GradientState of_this = description.gradient_state(axis);
    if (of_this == GradientState::complete) continue;
    const auto& slot = buffer.layout().slots[static_cast<size_t>(index)];
    if (slot.start != range.end || of_this != state || axis == MeshAxis::pp) add_range();
    if (parameters == 0) {
      range.start = slot.start;
      first = &param;
    }
    range.end = slot.end;
    state = of_this;
    ++parameters;
  }
  add_range();
}

/// The buffers of a model, in an order that does not depend on what else a rank holds.
std::vector<const ParamAndGradBuffer*> buffers_in_order(const DistributedDataParallel& model,
                                                        const RankGrids& grids) {
  std::vector<const ParamAndGradBuffer*> buffers = model.buffers();
  const auto key = [&](const ParamAndGradBuffer* buffer) {
    const NamedParameter& first = buffer->params().front();
    return std::tuple(replicas(first.description), first.tensor.scalar_type(),
                      buffer->grad_data().scalar_type(), buffer->holds_whole_matrices(),
                      partial_axes(first.description, grids));
  };
  std::stable_sort(buffers.begin(), buffers.end(),
                   [&](const auto* a, const auto* b) { return key(a) < key(b); });
  return buffers;
}

Pieces collect(const FinalizeContext& context) {
  const RankGrids& grids = context.state().grids();
  Pieces pieces;
  for (const DistributedDataParallel* model : context.models)
    for (const ParamAndGradBuffer* buffer : buffers_in_order(*model, grids))
      for (const MeshAxis axis : model_axes(buffer->params().front().description))
        if (grids.size(group_kind_of(axis)) > 1)
          for (const auto& bucket : buffer->layout().buckets)
            collect(*buffer, bucket, axis, pieces);
  return pieces;
}

/// Reduces pieces over one group: large ones in place, small ones packed together.
class PieceReducer {
 public:
  PieceReducer(FinalizeContext& context, const Key& key)
      : context_(context),
        group_(context.state().group(group_kind_of(key.axis))),
        op_(key.state == GradientState::partial_mean ? ReduceOp::average : ReduceOp::sum),
        label_(fmt::format("gradients that are {} over {}", to_string(key.state),
                           to_string(key.axis))),
        over_stages_(key.axis == MeshAxis::pp) {}

  void run(const std::vector<Piece>& pieces) {
    for (const Piece& piece : pieces) {
      if (piece.bytes() > kInPlaceBytes) {
        works_.push_back(reduce(piece.grads, piece.parameters, label_of({piece})));
        continue;
      }
      if (packed_bytes_ + piece.bytes() > kPackedBytes) flush();
      small_.push_back(piece);
      packed_bytes_ += piece.bytes();
    }
    flush();
    for (Work& work : works_) work.wait();
  }

 private:
  /// Stages match their parameters only by order, so the label must tell them apart.
  std::string label_of(const std::vector<Piece>& pieces) const {
    constexpr size_t kMostNamed = 8;
    if (!over_stages_) return label_;
    std::string names, text = label_;
    for (const Piece& piece : pieces)
      names += fmt::format("{}'{}' {}", names.empty() ? ": " : ", ", piece.first->name,
                           piece.first->tensor.sizes());
    if (pieces.size() <= kMostNamed) return text + names;
    return text + fmt::format(": '{}' to '{}', digest {:016x}", pieces.front().first->name,
                              pieces.back().first->name, text_digest(names));
  }

  Work reduce(const at::Tensor& grads, int64_t parameters, const std::string& label) {
    context_.note(group_, {GradOperation::Kind::all_reduce, op_},
                  static_cast<int64_t>(grads.nbytes()), parameters);
    return all_reduce(group_, grads, op_, label);
  }

  void flush() {
    if (small_.empty()) return;
    int64_t parameters = 0;
    std::vector<at::Tensor> grads;
    for (const Piece& piece : small_) {
      grads.push_back(piece.grads);
      parameters += piece.parameters;
    }
    if (grads.size() == 1)
      works_.push_back(reduce(grads.front(), parameters, label_of(small_)));
    else
      reduce_packed(grads, parameters);
    small_.clear();
    packed_bytes_ = 0;
  }

  void reduce_packed(const std::vector<at::Tensor>& grads, int64_t parameters) {
    const int64_t item = grads.front().element_size();
    if (!buffer_.defined()) buffer_ = at::empty({kPackedBytes / item}, grads.front().options());
    at::Tensor packed = buffer_.narrow(0, 0, packed_bytes_ / item);
    at::cat_out(packed, grads);
    reduce(packed, parameters, label_of(small_)).wait();
    int64_t offset = 0;
    for (at::Tensor grad : grads) {
      grad.copy_(packed.narrow(0, offset, grad.numel()));
      offset += grad.numel();
    }
  }

  FinalizeContext& context_;
  ProcessGroup group_;
  ReduceOp op_;
  std::string label_;
  bool over_stages_;
  std::vector<Work> works_;
  std::vector<Piece> small_;
  int64_t packed_bytes_ = 0;
  at::Tensor buffer_;
};

void reduce_partial_gradients(FinalizeContext& context) {
  const at::NoGradGuard no_grad;
  for (const auto& [key, pieces] : collect(context)) PieceReducer(context, key).run(pieces);
}

bool is_partial(const ParamDescription& description, const RankGrids& grids, GradientScalingMode) {
  return !partial_axes(description, grids).empty();
}

}  // namespace

const FinalizePass kPartialGradients = {.name = "partial gradients",
                                        .run = reduce_partial_gradients,
                                        .changes = is_partial,
                                        .left_undone = kNotAddedUp};

void check_partial_over_stages(const std::vector<DistributedDataParallel*>& models) {
  const ParallelState& state = models.front()->parallel_state();
  const ProcessGroup stages = state.group(GroupKind::pp);
  if (stages.size() == 1) return;
  using Kind = std::pair<GradientState, at::ScalarType>;
  std::map<Kind, std::vector<NamedParameter>> kinds;
  for (const DistributedDataParallel* model : models)
    for (const ParamAndGradBuffer* buffer : buffers_in_order(*model, state.grids()))
      for (const auto& bucket : buffer->layout().buckets)
        for (const int64_t index : bucket.params) {
          const NamedParameter& param = buffer->params()[static_cast<size_t>(index)];
          const GradientState kind = param.description.gradient_state(MeshAxis::pp);
          if (kind != GradientState::complete)
            kinds[{kind, buffer->grad_data().scalar_type()}].push_back(param);
        }
  std::vector<NamedParameter> in_order;
  for (const auto& [kind, params] : kinds)
    in_order.insert(in_order.end(), params.begin(), params.end());
  notify_outside_on_error(stages, state, [&] { check_same_parameters(in_order, stages); });
}

}  // namespace lockstep
