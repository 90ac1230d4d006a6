#include <algorithm>
#include <cmath>
#include <set>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/parallel_state/axis_groups.h"
#include "lockstep/parallel_state/pipeline_position.h"
#include "lockstep/testing/faults.h"
#include "lockstep/testing/param_pieces.h"

namespace lockstep::testing {
namespace {

/// Identifies a use of a parameter.
struct UseKey {
  int64_t microbatch;
  std::string param;
  int64_t number;  ///< among those of the parameter in the micro-batch
  auto operator<=>(const UseKey&) const = default;
};

/// The uses of one run, in order.
class Uses {
 public:
  explicit Uses(const std::vector<ParamUse>& uses) {
    std::map<std::pair<int64_t, std::string>, int64_t> counts;
    for (const ParamUse& use : uses)
      for (const std::string& param : use.params) {
        const UseKey key = {use.microbatch, param, counts[{use.microbatch, param}]++};
        position_[key] = order_.size();
        order_.emplace_back(key, &use);
      }
  }

  const std::vector<std::pair<UseKey, const ParamUse*>>& in_order() const { return order_; }
  const ParamUse* find(const UseKey& key) const {
    const auto found = position_.find(key);
    return found == position_.end() ? nullptr : order_[found->second].second;
  }
  std::optional<size_t> position(const UseKey& key) const {
    const auto found = position_.find(key);
    return found == position_.end() ? std::nullopt : std::optional(found->second);
  }

 private:
  std::vector<std::pair<UseKey, const ParamUse*>> order_;
  std::map<UseKey, size_t> position_;
};

/// A use whose input differs from that in one process.
struct BadInput {
  int64_t rank = 0;
  UseKey key = {};
  const ParamUse* use = nullptr;
  const ParamUse* before = nullptr;  ///< the rank's use before it; null: none
  UseKey key_before = {};
  size_t position = 0;  ///< in one process
};

class ForwardFault {
 public:
  explicit ForwardFault(const Comparison& comparison)
      : c_(comparison), whole_(comparison.whole().uses) {
    for (int64_t rank = 0; rank < c_.layout.ranks; ++rank)
      ranks_.emplace_back(c_.of_rank(rank).uses);
  }

  std::optional<Finding> find() const {
    const double total = loss_of(first_rank_with_loss());
    const bool differs = differs_from_whole(total) || losses_differ();
    if (!differs) return {};
    if (const auto bad = first_bad_input()) return cause_of(*bad);
    return cause_of_loss(total);
  }

  /// A use that one process has before place `end` but no rank has; only of `param`, if set.
  std::optional<Finding> missing_use(size_t end, const std::string& param = "") const {
    for (size_t i = 0; i < std::min(end, whole_.in_order().size()); ++i) {
      const auto& [key, use] = whole_.in_order()[i];
      if (!param.empty() && key.param != param) continue;
      const bool found = std::any_of(ranks_.begin(), ranks_.end(),
                                     [&key = key](const Uses& uses) { return uses.find(key); });
      if (found) continue;
      return finding("forward", key.param, "", {},
                     fmt::format("{} uses it in one process and no rank does so here: it is used "
                                 "through a tensor that is not the parameter, such as a view or a "
                                 "copy that was made before DistributedDataParallel moved it; take "
                                 "the parameter from its module in each forward",
                                 use->operation));
    }
    return {};
  }

 private:
  bool has_loss(int64_t rank) const { return PipelinePosition(c_.grids, rank).is_last_stage(); }

  int64_t first_rank_with_loss() const {
    int64_t rank = 0;
    while (!has_loss(rank)) ++rank;
    return rank;
  }

  /// The loss of the data-parallel ranks of `rank`.
  double loss_of(int64_t rank) const {
    const RankList group = c_.grids.group_of(GroupKind::dp_cp, rank);
    double total = 0;
    for (const int64_t member : group) total += c_.of_rank(member).loss;
    return c_.per_token ? total : total / static_cast<double>(group.size());
  }

  bool differs_from_whole(double loss) const {
    const double expected = c_.whole().loss;
    return !(std::abs(loss - expected) <=
             c_.options.tolerance * std::max(1e-3, std::abs(expected)) * 10);
  }

  bool losses_differ() const {
    for (int64_t rank = 0; rank < c_.layout.ranks; ++rank)
      if (has_loss(rank) && differs_from_whole(loss_of(rank))) return true;
    return false;
  }

  /// Whether the loss is the same on all ranks of tp: then their terms were added up somewhere.
  bool tensor_ranks_agree() const {
    for (int64_t rank = 0; rank < c_.layout.ranks; ++rank) {
      if (!has_loss(rank)) continue;
      const double own = c_.of_rank(rank).loss;
      for (const int64_t other : c_.grids.group_of(GroupKind::tp, rank))
        if (std::abs(c_.of_rank(other).loss - own) > 1e-9 * std::max(1e-3, std::abs(own)))
          return false;
    }
    return true;
  }

  std::optional<BadInput> first_bad_input() const {
    std::optional<BadInput> first;
    for (int64_t rank = 0; rank < c_.layout.ranks; ++rank) {
      const auto& order = ranks_[static_cast<size_t>(rank)].in_order();
      for (size_t i = 0; i < order.size(); ++i) {
        const auto& [key, use] = order[i];
        const auto position = whole_.position(key);
        if (!position || (first && *position >= first->position)) continue;
        const ParamUse& expected = *whole_.in_order()[*position].second;
        if (expected.params != use->params || are_parts(use->inputs, expected.inputs)) continue;
        BadInput bad = {.rank = rank, .key = key, .use = use, .position = *position};
        note_before(order, i, bad);
        first = bad;
      }
    }
    return first;
  }

  /// Notes the use before number `i`, by its first parameter.
  static void note_before(const std::vector<std::pair<UseKey, const ParamUse*>>& order, size_t i,
                          BadInput& bad) {
    for (const ParamUse* const own = order[i].second; i > 0 && order[i].second == own;) --i;
    if (order[i].second == bad.use || order[i].first.microbatch != bad.key.microbatch) return;
    bad.before = order[i].second;
    while (i > 0 && order[i - 1].second == bad.before) --i;
    bad.key_before = order[i].first;
  }

  static bool are_parts(const std::vector<at::Tensor>& parts,
                        const std::vector<at::Tensor>& wholes) {
    return std::all_of(parts.begin(), parts.end(),
                       [&](const at::Tensor& part) { return is_part(part, wholes); });
  }

  /// The ranks along the axis that cuts the parameter's matrices, `rank` among them.
  RankList tensor_ranks(int64_t rank, const std::string& param) const {
    const NamedParameter* const local = c_.find(rank, param);
    const ParamDescription description = local ? local->description : ParamDescription();
    return c_.grids.group_of(group_kind_of(tensor_axis(description)), rank);
  }

  std::string tensor_axis_of(int64_t rank, const std::string& param) const {
    const NamedParameter* const local = c_.find(rank, param);
    return lockstep::to_string(tensor_axis(local ? local->description : ParamDescription()));
  }

  /// The sum over those ranks of the first output of a use; undefined if it cannot be formed.
  at::Tensor sum_of_outputs(int64_t rank, const UseKey& key) const {
    at::Tensor sum;
    for (const int64_t member : tensor_ranks(rank, key.param)) {
      const ParamUse* const use = ranks_[static_cast<size_t>(member)].find(key);
      if (!use || use->outputs.empty()) return {};
      const at::Tensor& output = use->outputs.front();
      if (sum.defined() && sum.sizes() != output.sizes()) return {};
      sum = sum.defined() ? sum + output : output;
    }
    return sum;
  }

  /// Finds a parameter of `use` that every tensor-parallel rank has added.
  std::optional<Finding> added_on_every_rank(int64_t rank, const UseKey& key,
                                             const ParamUse& use) const {
    const auto ranks = static_cast<double>(tensor_ranks(rank, key.param).size());
    const ParamUse* const expected = whole_.find(key);
    if (ranks < 2 || !expected || !tensor_ranks_agree()) return {};
    const at::Tensor sum = sum_of_outputs(rank, key);
    if (!sum.defined()) return {};
    for (const std::string& name : use.params) {
      const NamedParameter* const param = c_.find(rank, name);
      if (!param || std::holds_alternative<Shard>(
                        param->description.placement(tensor_axis(param->description))))
        continue;
      const at::Tensor value = c_.of_rank(rank).before.at(name);
      if (value.dim() != 1 || value.size(0) != sum.size(-1)) continue;
      if (!is_part(sum - (ranks - 1) * value, expected->outputs)) continue;
      return finding("forward", name, tensor_axis_of(rank, name), ranks,
                     fmt::format("each of the {:.0f} ranks of {} adds it before their terms are "
                                 "added up, so that it counts {:.0f} times; add it after "
                                 "reduce_from_group()",
                                 ranks, tensor_axis_of(rank, name), ranks));
    }
    return {};
  }

  std::optional<Finding> cause_of_output(int64_t rank, const UseKey& key,
                                         const ParamUse& use) const {
    if (auto bias = added_on_every_rank(rank, key, use)) return bias;
    const ParamUse* const expected = whole_.find(key);
    if (!expected || are_parts(use.outputs, expected->outputs)) return {};
    const std::string axis = tensor_axis_of(rank, key.param);
    const at::Tensor sum = sum_of_outputs(rank, key);
    if (sum.defined() && is_part(sum, expected->outputs))
      return finding("forward", key.param, axis, {},
                     fmt::format("each rank of {} has one term of the output of {}, and the terms "
                                 "are not summed: an all-reduce (reduce_from_group) is missing "
                                 "after it",
                                 axis, use.operation));
    if (expected->params != use.params) return {};
    return finding("forward", key.param, "", {},
                   fmt::format("the output of {} differs on rank {} although its input is right: "
                               "the rank's piece is not the one that its description names ({})",
                               use.operation, rank, described(rank, key.param)));
  }

  std::string described(int64_t rank, const std::string& name) const {
    const NamedParameter* const param = c_.find(rank, name);
    return param ? param->description.to_string() : "none";
  }

  std::optional<Finding> cause_of(const BadInput& bad) const {
    if (auto bias = added_on_every_rank(bad.rank, bad.key, *bad.use)) return bias;
    if (bad.before) {
      if (auto fault = cause_of_output(bad.rank, bad.key_before, *bad.before)) return fault;
    }
    if (auto missing = missing_use(bad.position)) return missing;
    if (!bad.before)
      return finding("forward", bad.key.param, "", {},
                     fmt::format("its input differs on rank {}, and no parameter comes before it: "
                                 "the samples or tokens are not this rank's part of the "
                                 "micro-batch, or a collective is missing",
                                 bad.rank));
    const ParamUse* const expected = whole_.find(bad.key);
    const std::string& random =
        bad.use->random_before.empty() ? expected->random_before : bad.use->random_before;
    if (!random.empty())
      return finding("forward", bad.key_before.param, "", {},
                     fmt::format("what {} makes of it is right, and the input of '{}' behind it "
                                 "differs on rank {}: {} between them draws from another random "
                                 "stream than in one process; let the numbers follow from seed, "
                                 "step, sample and position alone, the same on ranks that hold "
                                 "the same activations",
                                 bad.before->operation, bad.key.param, bad.rank, random));
    return finding("forward", bad.key_before.param, "", {},
                   fmt::format("what {} makes of it is right, and the input of '{}' behind it "
                               "differs on rank {}: a collective, a cut or the order of the pieces "
                               "between them is wrong",
                               bad.before->operation, bad.key.param, bad.rank));
  }

  std::optional<Finding> cause_of_loss(double total) const {
    const int64_t rank = first_rank_with_loss();
    const auto& order = ranks_[static_cast<size_t>(rank)].in_order();
    const std::string last = order.empty() ? "" : order.back().first.param;
    if (!order.empty())
      if (auto fault = cause_of_output(rank, order.back().first, *order.back().second))
        return fault;
    if (auto missing = missing_use(SIZE_MAX)) return missing;
    const double ratio = total / c_.whole().loss;
    for (const GroupKind kind : {GroupKind::dp_cp, GroupKind::dp, GroupKind::cp, GroupKind::tp}) {
      const auto ranks = static_cast<double>(c_.grids.size(kind));
      if (ranks < 2 || !(std::abs(ratio / ranks - 1) <= 1e-9)) continue;
      const std::string axis = lockstep::to_string(kind);
      const bool batch = kind != GroupKind::tp;
      return finding("loss", last, axis, ratio,
                     fmt::format("the loss, and with it the gradient of this and every other "
                                 "parameter, is {} what it should be over {}: {}",
                                 times(ratio), axis,
                                 batch ? "the ranks' losses are means where a sum over the rank's "
                                         "tokens is expected, or each takes all samples"
                                       : "each rank counts the whole of it"));
    }
    return finding("loss", last, "", ratio,
                   fmt::format("the loss of rank {} and those it is added to is {:.17g}, in one "
                               "process {:.17g}; the activations of all parameters are right: what "
                               "comes behind the last of them differs",
                               rank, total, c_.whole().loss));
  }

  Finding finding(const char* pass, const std::string& param, const std::string& axis,
                  std::optional<double> factor, const std::string& text) const {
    return {.pass = pass,
            .parameter = param,
            .axis = axis,
            .factor = factor,
            .step = static_cast<int64_t>(c_.step),
            .text = fmt::format("`{}`: {}", param, text)};
  }

  const Comparison& c_;
  Uses whole_;
  std::vector<Uses> ranks_;
};

}  // namespace

std::optional<Finding> forward_fault(const Comparison& comparison) {
  return ForwardFault(comparison).find();
}

std::optional<Finding> unseen_use(const Comparison& comparison, const std::string& param) {
  return ForwardFault(comparison).missing_use(SIZE_MAX, param);
}

}  // namespace lockstep::testing
