#include <algorithm>
#include <cmath>
#include <set>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/parallel_state/axis_groups.h"
#include "lockstep/testing/faults.h"
#include "lockstep/testing/param_pieces.h"

namespace lockstep::testing {
namespace {

constexpr double kRounding = 1e-9;

/// One parameter whose final gradient is wrong somewhere.
class GradientFault {
 public:
  GradientFault(const Comparison& comparison, const std::string& name, double tolerance)
      : c_(comparison), name_(name), tolerance_(tolerance) {
    for (int64_t rank = 0; rank < c_.layout.ranks; ++rank)
      if (const NamedParameter* const param = c_.find(rank, name_)) {
        holders_.push_back(rank);
        param_ = param;
      }
  }

  Finding find(const std::vector<std::string>& all_wrong) const {
    if (auto fault = over_batch()) return *fault;
    for (const MeshAxis axis : model_axes(param_->description))
      if (auto fault = over(axis, all_wrong)) return *fault;
    if (auto fault = over_stages()) return *fault;
    if (auto fault = unseen_use(c_, name_)) return *fault;
    return unexplained();
  }

 private:
  at::Tensor expected(int64_t rank) const {
    const auto whole = c_.whole().local.find(name_);
    const at::Tensor of_whole = whole == c_.whole().local.end()
                                    ? at::zeros_like(c_.whole().before.at(name_))
                                    : whole->second;
    return c_.piece(rank, *c_.find(rank, name_), of_whole);
  }

  at::Tensor local(int64_t rank) const {
    const TensorsByName& grads = c_.of_rank(rank).local;
    const auto found = grads.find(name_);
    return found == grads.end() ? at::zeros_like(expected(rank)) : found->second;
  }

  RankList replicas_of(int64_t rank) const {
    return c_.grids.group_of(replicas(param_->description), rank);
  }

  /// The result of the data-parallel reduction of the local gradients.
  at::Tensor over_replicas(int64_t rank) const {
    at::Tensor sum;
    for (const int64_t member : replicas_of(rank))
      sum = sum.defined() ? sum + local(member) : local(member);
    if (!c_.per_token) sum = sum / static_cast<double>(c_.grids.size(GroupKind::dp_cp));
    return sum;
  }

  bool right(const at::Tensor& found, int64_t rank) const {
    return is_near(found, expected(rank), tolerance_);
  }

  /// The factor by which `found` differs from the right gradient, if there is one.
  std::optional<double> ratio(const at::Tensor& found, int64_t rank) const {
    const at::Tensor right_one = expected(rank);
    const double norm = right_one.square().sum().item<double>();
    if (norm == 0) return {};
    const double factor = (found * right_one).sum().item<double>() / norm;
    if (!is_near(found, factor * right_one, tolerance_ * std::max(1.0, std::abs(factor))))
      return {};
    return factor;
  }

  Finding finding(const char* pass, const std::string& axis, std::optional<double> factor,
                  const std::string& text) const {
    const std::string over = axis.empty() ? "" : " over " + axis;
    const std::string what =
        factor ? fmt::format("the gradient is {} what it should be{}", times(*factor), over)
               : fmt::format("the gradient is wrong{}", over);
    return {.pass = pass,
            .parameter = name_,
            .axis = axis,
            .factor = factor,
            .step = static_cast<int64_t>(c_.step),
            .text = fmt::format("`{}`: {}: {}{}", name_, what, text, undescribed())};
  }

  std::string undescribed() const {
    ParamDescription usual = default_description(param_->tensor);
    return usual.to_string() == param_->description.to_string()
               ? " (its description is the default one; nobody may have described it)"
               : "";
  }

  /// Finds a factor that is the same on the ranks that have other samples or tokens.
  std::optional<Finding> over_batch() const {
    const int64_t rank = holders_.front();
    const auto factor = ratio(over_replicas(rank), rank);
    if (!factor || std::abs(*factor - 1) < 1e-9) return {};
    for (const int64_t other : holders_) {
      const auto same = ratio(over_replicas(other), other);
      if (!same || std::abs(*same / *factor - 1) > 1e-9) return {};
    }
    for (const GroupKind kind :
         {GroupKind::dp_cp, GroupKind::dp, GroupKind::cp, GroupKind::expert_dp}) {
      const auto ranks = static_cast<double>(c_.grids.size(kind));
      if (ranks < 2 || std::abs(*factor / ranks - 1) > 1e-9) continue;
      const bool each = std::all_of(holders_.begin(), holders_.end(),
                                    [&](int64_t holder) { return right(local(holder), holder); });
      return finding("backward", lockstep::to_string(kind), factor,
                     each ? "it is complete on each rank already: every rank takes all samples"
                          : "the ranks' losses are means where sums over the rank's tokens are "
                            "expected");
    }
    return {};
  }

  bool is_cut(MeshAxis axis) const {
    return std::holds_alternative<Shard>(param_->description.placement(axis));
  }

  /// The gradients that the ranks of an axis hold after the data-parallel reduction.
  struct OverAxis {
    bool each = true;              ///< each rank's is right
    bool sum = true;               ///< their sum is right
    bool mean = true;              ///< their mean is right
    std::set<int64_t> users = {};  ///< positions on the axis with a gradient that is not zero
  };

  OverAxis look(MeshAxis axis) const {
    OverAxis found;
    for (const int64_t rank : holders_) {
      const RankList group = c_.grids.group_of(group_kind_of(axis), rank);
      at::Tensor total;
      int64_t position = 0;
      for (const int64_t member : group) {
        const int64_t at = position++;
        if (!c_.find(member, name_)) continue;
        const at::Tensor one = over_replicas(member);
        if (largest(one) > 0) found.users.insert(at);
        found.each = found.each && right(one, member);
        if (total.defined() && total.sizes() != one.sizes()) return {false, false, false, {}};
        total = total.defined() ? total + one : one;
      }
      found.sum = found.sum && right(total, rank);
      found.mean = found.mean && right(total / static_cast<double>(group.size()), rank);
    }
    return found;
  }

  std::optional<Finding> over(MeshAxis axis, const std::vector<std::string>& all_wrong) const {
    const auto ranks = static_cast<double>(c_.grids.size(group_kind_of(axis)));
    if (ranks < 2 || is_cut(axis) || (axis == MeshAxis::pp && holders_.size() < 2)) return {};
    const std::string name = lockstep::to_string(axis);
    const GradientState state = param_->description.gradient_state(axis);
    const OverAxis found = look(axis);
    if (axis == MeshAxis::pp && !param_->description.is_on_all_stages()) return {};
    if (found.each && state == GradientState::partial_sum)
      return finding("finalize", name, ranks,
                     fmt::format("it is declared partial-sum and its gradient is complete already "
                                 "on each rank of {}; declare it complete",
                                 name));
    if (found.each) return {};
    if (found.sum && state == GradientState::partial_mean)
      return finding("finalize", name, 1 / ranks,
                     fmt::format("it is declared partial-mean and each rank of {} holds a term of "
                                 "a sum; declare it partial-sum",
                                 name));
    if (found.mean && state != GradientState::partial_mean)
      return finding("finalize", name,
                     state == GradientState::partial_sum ? std::optional(ranks) : std::nullopt,
                     fmt::format("it is declared {} and each rank of {} holds a term of a mean; "
                                 "declare it partial-mean",
                                 lockstep::to_string(state), name));
    if (found.sum && state == GradientState::complete) return terms(name, found, all_wrong);
    return {};
  }

  Finding terms(const std::string& axis, const OverAxis& found,
                const std::vector<std::string>& all_wrong) const {
    if (found.users.size() == 1)
      return finding("backward", axis, {},
                     fmt::format("it is declared complete and only the rank at position {} of {} "
                                 "uses it; declare it partial-sum, or let every rank use it alike",
                                 *found.users.begin(), axis));
    const std::string upstream =
        all_wrong.size() > 1
            ? fmt::format(
                  ", or, as the gradients of {} parameters before it are wrong too, an "
                  "all-reduce of backward (copy_to_group) is missing after it",
                  all_wrong.size() - 1)
            : ", or let backward add them up (copy_to_group)";
    return finding("backward", axis, {},
                   fmt::format("it is declared complete and each rank of {} holds a term of the "
                               "sum; declare it partial-sum{}",
                               axis, upstream));
  }

  /// Finds copies on several stages that are not tied.
  std::optional<Finding> over_stages() const {
    if (c_.grids.size(GroupKind::pp) < 2 || param_->description.is_on_several_stages()) return {};
    at::Tensor total;
    std::vector<int64_t> stages;
    const RankList pipeline = c_.grids.group_of(GroupKind::pp, holders_.front());
    for (size_t stage = 0; stage < pipeline.size(); ++stage)
      if (c_.find(pipeline[stage], name_)) {
        const at::Tensor one = over_replicas(pipeline[stage]);
        total = total.defined() ? total + one : one;
        stages.push_back(static_cast<int64_t>(stage));
      }
    if (stages.size() < 2 || !right(total, holders_.front())) return {};
    return finding("finalize", "pp", {},
                   fmt::format("the stages {} hold copies of it, each with a term of its gradient, "
                               "and its description does not tie them; set ParamDescription::tie",
                               fmt::join(stages, ", ")));
  }

  /// The largest difference of a rank's gradient, relative to the largest gradient of the model.
  double difference() const {
    double most = 0;
    for (const int64_t rank : holders_)
      most = std::max(most, largest(c_.of_rank(rank).reduced.at(name_) - expected(rank)));
    return most / tolerance_ * c_.options.tolerance;
  }

  Finding unexplained() const {
    if (const double off = difference(); off < kRounding)
      return finding("backward", "", {},
                     fmt::format("it differs by {:.1e} of the model's largest gradient, and "
                                 "CheckOptions::tolerance is {:.1e}: this may be rounding, which "
                                 "grows with the learning rate and with large activations",
                                 off, c_.options.tolerance));
    const int64_t rank = holders_.front();
    const at::Tensor mine = over_replicas(rank);
    if (const auto factor = ratio(c_.of_rank(rank).reduced.at(name_).nan_to_num(), rank))
      if (std::abs(*factor - 1) > 1e-9)
        return finding("finalize", "", factor,
                       "see its description: " + param_->description.to_string());
    const auto whole = c_.whole().local.find(name_);
    if (whole != c_.whole().local.end() && is_part(mine, {whole->second}))
      return finding("backward", "", {},
                     fmt::format("the rank's gradient is that of another piece than its "
                                 "description says, a wrong dimension or order of the pieces: {}",
                                 param_->description.to_string()));
    return finding("backward", "", {},
                   fmt::format("what rank {} has of it before the reduction is no term of it; a "
                               "collective of backward behind it is missing or too many ({})",
                               rank, param_->description.to_string()));
  }

  const Comparison& c_;
  std::string name_;
  double tolerance_;
  std::vector<int64_t> holders_;
  const NamedParameter* param_ = nullptr;
};

/// The parameters in the order in which forward reaches them first. A fault in backward spoils
/// those before it.
std::vector<std::string> in_forward_order(const Comparison& comparison) {
  std::vector<std::string> order;
  const auto add = [&](const std::string& name) {
    if (std::find(order.begin(), order.end(), name) == order.end()) order.push_back(name);
  };
  for (const ParamUse& use : comparison.whole().uses)
    for (const std::string& param : use.params) add(param);
  for (const NamedParameter& param : comparison.reference.params) add(param.name);
  return order;
}

}  // namespace

const NamedParameter* Comparison::find(int64_t rank, const std::string& name) const {
  for (const NamedParameter& param : ranks[static_cast<size_t>(rank)].params)
    if (param.name == name) return &param;
  return nullptr;
}

at::Tensor Comparison::piece(int64_t rank, const NamedParameter& param,
                             const at::Tensor& of_whole) const {
  return *piece_of(of_whole, param.description, grids, rank, rows_of(param));
}

double Comparison::tolerance() const {
  double most = 0;
  for (const auto& [name, grad] : whole().local) most = std::max(most, largest(grad));
  return options.tolerance * std::max(most, 1e-300);
}

std::optional<Finding> gradient_fault(const Comparison& comparison, double& difference) {
  const double allowed = comparison.tolerance();
  std::set<std::string> wrong;
  difference = 0;
  for (int64_t rank = 0; rank < comparison.layout.ranks; ++rank)
    for (const auto& [name, found] : comparison.of_rank(rank).reduced) {
      const NamedParameter& param = *comparison.find(rank, name);
      const auto whole = comparison.whole().local.find(name);
      const at::Tensor expected =
          comparison.piece(rank, param,
                           whole == comparison.whole().local.end()
                               ? at::zeros_like(comparison.whole().before.at(name))
                               : whole->second);
      const double off = largest(found - expected);
      difference = std::max(difference, off / allowed * comparison.options.tolerance);
      if (!(off <= allowed)) wrong.insert(name);
    }
  if (wrong.empty()) return {};
  std::vector<std::string> in_order;
  for (const std::string& name : in_forward_order(comparison))
    if (wrong.contains(name)) in_order.push_back(name);
  return GradientFault(comparison, in_order.back(), allowed).find(in_order);
}

std::string times(double factor) {
  const double inverse = 1 / factor;
  if (factor < 1 && std::abs(inverse - std::round(inverse)) < 1e-6)
    return fmt::format("1/{:.0f} of", inverse);
  if (std::abs(factor - std::round(factor)) < 1e-6 * std::abs(factor))
    return fmt::format("{:.0f} times", factor);
  return fmt::format("{:.6g} times", factor);
}

}  // namespace lockstep::testing
