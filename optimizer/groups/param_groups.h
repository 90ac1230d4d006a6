#pragma once

#include <concepts>
#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/core/config.h"
#include "lockstep/core/parameters.h"

/// Learning rates and weight decay that differ between parameters.
namespace lockstep {

/// Replaces the configuration's numbers for the parameters that `applies_to` accepts:
///
///     {.applies_to = matches_name("*.bias", "*norm*"), .wd_mult = 0}
///
/// Several overrides may apply to one parameter if they set different fields, or the same values.
/// Every rank must pass the same overrides. A parameter that is cut over several ranks has the same
/// name on all of them; decide by the name or the description, not by the tensor.
struct ParamOverride {
  std::function<bool(const NamedParameter&)> applies_to = {};
  std::optional<double> max_lr = {};   ///< in place of optimizer.lr
  std::optional<double> min_lr = {};   ///< in place of optimizer.min_lr
  std::optional<double> wd_mult = {};  ///< factor of the weight decay; else 1, or 0 where the
                                       ///< parameter's description has apply_weight_decay = false
};

/// Accepts the parameters whose whole name matches one of `patterns`. In a pattern * matches any
/// number of characters, including dots, and ? matches one: "decoder.layers.*.mlp.*".
std::function<bool(const NamedParameter&)> matches_name(std::vector<std::string> patterns);
template <std::convertible_to<std::string>... Patterns>
std::function<bool(const NamedParameter&)> matches_name(const Patterns&... patterns) {
  return matches_name(std::vector<std::string>{std::string(patterns)...});
}

/// Parameters with equal settings.
struct ParamGroup {
  double max_lr = 0;
  double min_lr = 0;
  double wd_mult = 1;
  double lr = 0;                        ///< of the next step; at first max_lr
  std::vector<std::string> names = {};  ///< of this rank's parameters, in the order of the buffers
};

/// The groups of some parameters.
struct GroupedParams {
  std::vector<ParamGroup> groups;
  std::vector<size_t> group_of;  ///< for each parameter, in their order
};

/// Whether a list of parameters is all that a model has.
enum class ListedParams {
  all,   ///< an override that applies to none of them is a mistake
  some,  ///< others are on other ranks
};

/// Puts parameters with equal settings into one group. First comes the group with the
/// configuration's learning rates and wd_mult 1, whether it has parameters or not; the others
/// follow in ascending order of max_lr, min_lr and wd_mult, so that ranks with different parameters
/// have their common groups in the same order.
///
/// `config` acts as an override, too: parameters with is_embedding_or_output use
/// optimizer.decoupled_lr and decoupled_min_lr if these are set.
///
/// ConfigError: overrides that set one field of a parameter to different values, naming the
/// parameter, the field and both; a min_lr above max_lr; a number that is not finite or is below 0;
/// an override without applies_to; one that applies to no parameter, with ListedParams::all.
GroupedParams group_params(const std::vector<NamedParameter>& params, const OptimizerConfig& config,
                           const std::vector<ParamOverride>& overrides = {},
                           ListedParams listed = ListedParams::all);

/// "max_lr 0.01, min_lr 0, wd_mult 1"
std::string to_string(const ParamGroup& group);

/// What distinguishes a group from the `first` one: "wd_mult 0"; "default" for the first one
/// itself.
std::string name_of(const ParamGroup& group, const ParamGroup& first);

}  // namespace lockstep
