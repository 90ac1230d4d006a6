#include <map>
#include <numeric>
#include <sstream>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
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
  std::vector<at::Tensor> grads() const {
    const auto& slot = buffer->layout().slots[index];
    return reduced_grads(*buffer, {slot.start, slot.end});
  }
};

/// This rank's copies by stages and name, in the same order on all ranks.
using Copies = std::map<std::pair<TiedStages, std::string>, std::vector<Copy>>;

Copies collect(const std::vector<DistributedDataParallel*>& models) {
  Copies copies;
  for (const DistributedDataParallel* model : models)
    for (const auto& buffer : model->buffers())
      for (size_t i = 0; i < buffer->params().size(); ++i) {
        const auto& tie = buffer->params()[i].description.tie;
        if (tie) copies[{tie->stages, tie->name}].push_back({buffer.get(), i});
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

}  // namespace

void check_ties_over_stages(const std::vector<DistributedDataParallel*>& models,
                            const std::vector<std::string>& settings) {
  const ProcessGroup group = models.front()->parallel_state().group(GroupKind::pp);
  std::string own;
  auto setting = settings.begin();
  for (const DistributedDataParallel* model : models)
    for (const auto& buffer : model->buffers())
      for (const NamedParameter& param : buffer->params()) {
        if (const auto& tie = param.description.tie)
          own += fmt::format("{}\t{}\t{}\n", static_cast<int>(tie->stages), tie->name, *setting);
        ++setting;
      }
  const std::vector<std::string> held =
      group.size() == 1 ? std::vector{own} : all_gather_texts(group, own, "tied parameters");
  std::map<std::string, std::pair<std::string, size_t>> first;  // setting and stage, by tie
  for (size_t holder = 0; holder < held.size(); ++holder) {
    std::istringstream lines(held[holder]);
    for (std::string line; std::getline(lines, line);) {
      const std::string tie = line.substr(0, line.rfind('\t') + 1);
      const std::string name = tie.substr(2, tie.size() - 3), found = line.substr(tie.size());
      const auto stages = static_cast<TiedStages>(line.front() - '0');
      for (const size_t stage : stages_of(stages, held.size()))
        require<CommunicationError>(
            ("\n" + held[stage]).find("\n" + tie) != std::string::npos,
            "the parameter tied as '{}' on {}: rank {} (stage {} of {}) holds no copy that is "
            "trained",
            name, to_string(stages), group.ranks()[stage], stage, held.size());
      const auto& [expected, where] = first.try_emplace(tie, found, holder).first->second;
      require<ConfigError>(found == expected,
                           "the parameter tied as '{}' on {}: found copies with {} on rank {} and "
                           "with {} on rank {}, allowed: equal settings",
                           name, to_string(stages), expected, group.ranks()[where], found,
                           group.ranks()[holder]);
    }
  }
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
              copy.buffer->holds_whole_matrices() == copies.front().buffer->holds_whole_matrices(),
          "finalize_model_grads: parameters '{}' {} and '{}' {} are tied as '{}', but differ in "
          "shape, dtype of the gradient or sharding",
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
        context.note("tied gradients", group, "all-reduce sum",
                     static_cast<int64_t>(grads.nbytes()), 1);
      }
    }
    for (size_t i = 1; i < copies.size(); ++i) {
      const std::vector<at::Tensor> others = copies[i].grads();
      for (size_t k = 0; k < sum.size(); ++k) at::Tensor(others[k]).copy_(sum[k]);
    }
  }
}

}  // namespace lockstep
