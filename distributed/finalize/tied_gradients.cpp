#include <algorithm>
#include <map>
#include <numeric>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/core/text_fields.h"
#include "lockstep/distributed/finalize_passes.h"
#include "lockstep/distributed/owned_grads.h"
#include "lockstep/parallel_state/axis_groups.h"
#include "lockstep/parallel_state/collectives.h"

namespace lockstep {
namespace {

/// One copy of a tied parameter in a model of this rank.
struct Copy {
  const ParamAndGradBuffer* buffer;
  size_t index;

  const NamedParameter& param() const { return buffer->params()[index]; }
  /// Where it lies, if it is cut: copies with the same answer have the same pieces on each rank.
  std::string place() const {
    if (!buffer->is_sharded() || buffer->all_reduced()) return "";
    const ParamLayout::Slot& slot = buffer->layout().slots[index];
    const ParamLayout::Bucket& bucket = buffer->layout().buckets[static_cast<size_t>(slot.bucket)];
    return fmt::format(", element {} of a bucket of {}", slot.start - bucket.start,
                       bucket.end - bucket.start);
  }
  std::vector<at::Tensor> grads() const {
    const auto& slot = buffer->layout().slots[index];
    return reduced_grads(*buffer, {slot.start, slot.end});
  }
};

/// This rank's copies by stages and name, in the same order on all ranks.
using Copies = std::map<std::pair<TiedStages, std::string_view>, std::vector<Copy>>;

Copies collect(const std::vector<DistributedDataParallel*>& models) {
  Copies copies;
  for (const DistributedDataParallel* model : models)
    for (const auto& buffer : model->buffers())
      for (size_t i = 0; i < buffer->params().size(); ++i) {
        const auto& tie = buffer->params()[i].description.tie;
        if (tie) copies[{tie->stages, tie->name}].push_back({buffer, i});
      }
  return copies;
}

/// The ranks of a group of pipeline stages that hold a copy.
std::vector<size_t> stages_of(TiedStages stages, size_t count) {
  if (stages == TiedStages::first) return {0};
  if (stages == TiedStages::first_and_last) return {0, count - 1};
  std::vector<size_t> all(count);
  std::iota(all.begin(), all.end(), size_t{0});
  return all;
}

/// A trained copy of a tied parameter, as a stage reports it to the others.
struct HeldCopy {
  TiedStages stages;
  std::string name;     ///< of the tie
  std::string setting;  ///< how it is updated
};

constexpr const char* kTiedParameters = "tied parameters";

std::string encode_copies(const std::vector<HeldCopy>& copies) {
  std::string text;
  for (const HeldCopy& copy : copies) {
    append_field(text, std::to_string(static_cast<int>(copy.stages)));
    append_field(text, copy.name);
    append_field(text, copy.setting);
  }
  return text;
}

TiedStages decode_stages(std::string_view field) {
  for (const TiedStages stages : {TiedStages::first_and_last, TiedStages::all, TiedStages::first})
    if (field == std::to_string(static_cast<int>(stages))) return stages;
  fail<CommunicationError>("{}: what a rank sent is damaged: found stages '{}'", kTiedParameters,
                           field);
}

std::vector<HeldCopy> decode_copies(std::string_view text) {
  std::vector<HeldCopy> copies;
  while (!text.empty()) {
    const TiedStages stages = decode_stages(take_field(text, kTiedParameters));
    const std::string_view name = take_field(text, kTiedParameters);
    copies.push_back({stages, std::string(name), std::string(take_field(text, kTiedParameters))});
  }
  return copies;
}

std::vector<HeldCopy> own_copies(const std::vector<DistributedDataParallel*>& models,
                                 const std::vector<std::string>& settings) {
  std::vector<HeldCopy> copies;
  auto setting = settings.begin();
  for (const DistributedDataParallel* model : models)
    for (const auto& buffer : model->buffers())
      for (size_t i = 0; i < buffer->params().size(); ++i, ++setting)
        if (const auto& tie = buffer->params()[i].description.tie)
          copies.push_back({tie->stages, tie->name, *setting + Copy{&*buffer, i}.place()});
  return copies;
}

/// The copies of each rank of `group`, in the group's order.
std::vector<std::vector<HeldCopy>> all_copies(std::vector<HeldCopy> own,
                                              const ProcessGroup& group) {
  if (group.size() == 1) return {std::move(own)};
  std::vector<std::vector<HeldCopy>> held;
  for (const std::string& text : all_gather_texts(group, encode_copies(own), kTiedParameters))
    held.push_back(decode_copies(text));
  return held;
}

void require_copies(const HeldCopy& copy, const std::vector<std::vector<HeldCopy>>& held,
                    const ProcessGroup& group) {
  for (const size_t stage : stages_of(copy.stages, held.size()))
    require<CommunicationError>(
        std::any_of(held[stage].begin(), held[stage].end(),
                    [&](const HeldCopy& other) {
                      return other.stages == copy.stages && other.name == copy.name;
                    }),
        "the parameter tied as '{}' on {}: rank {} (stage {} of {}) holds no copy that is trained",
        copy.name, to_string(copy.stages), group.ranks()[stage], stage, held.size());
}

void check_ties(const FinalizeContext& context) {
  const ParallelState& state = context.state();
  for (const auto& [key, copies] : collect(context.models)) {
    const NamedParameter& first = copies.front().param();
    const Tie& tie = *first.description.tie;
    require<UsageError>(!state.grids().group_of(tie_group_kind(tie.stages), state.rank()).empty(),
                        "finalize_model_grads: parameter '{}' on rank {} is tied ('{}') on {}, but "
                        "this rank holds another stage",
                        first.name, state.rank(), tie.name, to_string(tie.stages));
    for (const Copy& copy : copies)
      require<UsageError>(
          copy.param().tensor.sizes() == first.tensor.sizes() &&
              copy.buffer->grad_data().scalar_type() ==
                  copies.front().buffer->grad_data().scalar_type() &&
              copy.buffer->is_sharded() == copies.front().buffer->is_sharded() &&
              copy.buffer->holds_whole_matrices() ==
                  copies.front().buffer->holds_whole_matrices() &&
              copy.buffer->all_reduced() == copies.front().buffer->all_reduced() &&
              copy.place() == copies.front().place(),
          "finalize_model_grads: parameters '{}' {} and '{}' {} are tied as '{}', but differ in "
          "shape, dtype of the gradient, sharding, padding of buckets or set_force_all_reduce()",
          first.name, first.tensor.sizes(), copy.param().name, copy.param().tensor.sizes(),
          tie.name);
  }
}

void sum_tied_gradients(FinalizeContext& context) {
  const at::NoGradGuard no_grad;
  for (const auto& [key, copies] : collect(context.models)) {
    const Tie& tie = *copies.front().param().description.tie;
    std::vector<at::Tensor> sum = copies.front().grads();
    for (size_t i = 1; i < copies.size(); ++i) {
      const std::vector<at::Tensor> terms = copies[i].grads();
      for (size_t k = 0; k < sum.size(); ++k) sum[k].add_(terms[k]);
    }
    const GroupKind kind = tie_group_kind(tie.stages);
    if (context.state().grids().size(kind) > 1) {
      const ProcessGroup group = context.state().group(kind);
      const std::string label =
          fmt::format("gradient tied as '{}' {}", tie.name, copies.front().param().tensor.sizes());
      for (const at::Tensor& grads : sum) {
        all_reduce(group, grads, ReduceOp::sum, label).wait();
        context.note(group, kAllReduceSum, static_cast<int64_t>(grads.nbytes()), 1);
      }
    }
    for (size_t i = 1; i < copies.size(); ++i) {
      const std::vector<at::Tensor> others = copies[i].grads();
      for (size_t k = 0; k < sum.size(); ++k) at::Tensor(others[k]).copy_(sum[k]);
    }
  }
}

bool is_tied(const ParamDescription& description, const RankGrids&, GradientScalingMode) {
  return description.tie.has_value();  // also with one stage: a rank may hold several copies
}

}  // namespace

const FinalizePass kTiedGradients = {.name = "tied gradients",
                                     .run = sum_tied_gradients,
                                     .check = check_ties,
                                     .changes = is_tied,
                                     .left_undone = kNotAddedUp};

void check_ties_over_stages(const std::vector<DistributedDataParallel*>& models,
                            const std::vector<std::string>& settings) {
  const ProcessGroup group = models.front()->parallel_state().group(GroupKind::pp);
  const std::vector<std::vector<HeldCopy>> held = all_copies(own_copies(models, settings), group);
  using Tied = std::pair<TiedStages, std::string_view>;
  std::map<Tied, std::pair<std::string_view, size_t>> first;  // setting and stage
  for (size_t holder = 0; holder < held.size(); ++holder)
    for (const HeldCopy& copy : held[holder]) {
      require_copies(copy, held, group);
      const auto& [expected, where] =
          first.try_emplace({copy.stages, copy.name}, copy.setting, holder).first->second;
      require<ConfigError>(copy.setting == expected,
                           "the parameter tied as '{}' on {}: found copies with {} on rank {} and "
                           "with {} on rank {}, allowed: equal settings",
                           copy.name, to_string(copy.stages), expected, group.ranks()[where],
                           copy.setting, group.ranks()[holder]);
    }
}

}  // namespace lockstep
