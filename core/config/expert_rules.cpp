#include "lockstep/core/expert_rules.h"

#include <algorithm>
#include <string>
#include <string_view>

#include "lockstep/core/check.h"
#include "lockstep/core/integers.h"

namespace lockstep {
namespace {

/// Whether moe_layer_freq is a single number, not a list. A list of one 1 is both and means the
/// same.
bool is_frequency(const std::vector<int64_t>& moe_layer_freq) {
  return moe_layer_freq.size() == 1 && moe_layer_freq[0] >= 1;
}

void check_layer_frequency(const TransformerConfig& model) {
  const std::vector<int64_t>& given = model.moe_layer_freq;
  if (is_frequency(given)) return;
  const char* const allowed = "a number >= 1, or 0 or 1 for each of the model.num_layers layers";
  require<ConfigError>(static_cast<int64_t>(given.size()) == model.num_layers,
                       "model.moe_layer_freq: found {} values for {} layers, allowed: {}",
                       given.size(), model.num_layers, allowed);
  for (size_t layer = 0; layer < given.size(); ++layer)
    require<ConfigError>(given[layer] == 0 || given[layer] == 1,
                         "model.moe_layer_freq: found {} for layer {}, allowed: {}", given[layer],
                         layer, allowed);
}

void check_router(const TransformerConfig& model) {
  const int64_t experts = *model.num_experts, topk = model.moe_router_topk;
  require<ConfigError>(topk <= experts,
                       "model.moe_router_topk: found {}, allowed: <= model.num_experts ({})", topk,
                       experts);
  const bool softmax = model.moe_router_score_function == RouterScoreFunction::softmax;
  require<ConfigError>(topk > 1 || !softmax || model.moe_router_pre_softmax,
                       "model.moe_router_pre_softmax: found false, allowed with "
                       "model.moe_router_topk = 1 and softmax: true, because the softmax over one "
                       "expert is always 1");
  require<ConfigError>(!model.moe_router_enable_expert_bias || !softmax,
                       "model.moe_router_enable_expert_bias: found true, which needs "
                       "model.moe_router_score_function = sigmoid");
  require<ConfigError>(
      model.moe_router_load_balancing_type != RouterLoadBalancing::none ||
          model.moe_aux_loss_coeff == 0,
      "model.moe_aux_loss_coeff: found {}, allowed with model.moe_router_load_balancing_type = "
      "none: 0",
      model.moe_aux_loss_coeff);
  require<ConfigError>(
      !model.moe_pad_expert_input_to_capacity || model.moe_expert_capacity_factor.has_value(),
      "model.moe_pad_expert_input_to_capacity: found true, which needs "
      "model.moe_expert_capacity_factor");
}

void check_router_groups(const TransformerConfig& model) {
  require<ConfigError>(
      model.moe_router_num_groups.has_value() == model.moe_router_group_topk.has_value(),
      "model.moe_router_group_topk: is {}, allowed: set together with model.moe_router_num_groups",
      model.moe_router_group_topk ? "set" : "not set");
  if (!model.moe_router_num_groups) return;
  const int64_t groups = *model.moe_router_num_groups, best = *model.moe_router_group_topk;
  const int64_t size =
      div_exact(*model.num_experts, groups, "model.num_experts", "model.moe_router_num_groups");
  require<ConfigError>(best <= groups,
                       "model.moe_router_group_topk: found {}, allowed: <= "
                       "model.moe_router_num_groups ({})",
                       best, groups);
  const int64_t each = div_exact(model.moe_router_topk, best, "model.moe_router_topk",
                                 "model.moe_router_group_topk");
  require<ConfigError>(each <= size,
                       "model.moe_router_topk: found {}, allowed: <= model.moe_router_group_topk "
                       "times the {} experts of a group",
                       model.moe_router_topk, size);
}

void check_layout(const TransformerConfig& model, const ParallelConfig& parallel,
                  const FieldNames& names) {
  const int64_t tp = parallel.tensor_model_parallel_size;
  div_exact(*model.num_experts, parallel.expert_model_parallel_size, "model.num_experts",
            "parallel.expert_model_parallel_size");
  div_exact(*model.moe_ffn_hidden_size, parallel.expert_tensor_parallel_size.value_or(tp),
            names.moe_ffn_hidden_size, names.expert_tensor_parallel_size);
  if (model.moe_shared_expert_intermediate_size)
    div_exact(*model.moe_shared_expert_intermediate_size, tp,
              "model.moe_shared_expert_intermediate_size", "parallel.tensor_model_parallel_size");
  const int64_t parts =
      checked_mul(tp, parallel.context_parallel_size,
                  "parallel.tensor_model_parallel_size * parallel.context_parallel_size");
  require<ConfigError>(model.seq_length % parts == 0,
                       "model.seq_length: found {}, allowed with model.num_experts: a multiple of "
                       "parallel.tensor_model_parallel_size * parallel.context_parallel_size ({})",
                       model.seq_length, parts);
}

/// Refuses a value other than the default in a field that only experts read.
template <class Value>
void expect_unused(const char* field, const Value& found, const Value& unused) {
  require<ConfigError>(found == unused, "model.{}: found {}, but model.num_experts is not set",
                       field, found);
}

void check_unused_router_fields(const TransformerConfig& model) {
  const TransformerConfig unused;
  expect_unused("moe_router_topk", model.moe_router_topk, unused.moe_router_topk);
  expect_unused<std::string_view>("moe_router_score_function",
                                  to_string(model.moe_router_score_function),
                                  to_string(unused.moe_router_score_function));
  expect_unused("moe_router_pre_softmax", model.moe_router_pre_softmax,
                unused.moe_router_pre_softmax);
  expect_unused<std::string_view>("moe_router_load_balancing_type",
                                  to_string(model.moe_router_load_balancing_type),
                                  to_string(unused.moe_router_load_balancing_type));
  expect_unused("moe_aux_loss_coeff", model.moe_aux_loss_coeff, unused.moe_aux_loss_coeff);
  expect_unused("moe_z_loss_coeff", model.moe_z_loss_coeff, unused.moe_z_loss_coeff);
  expect_unused("moe_router_enable_expert_bias", model.moe_router_enable_expert_bias,
                unused.moe_router_enable_expert_bias);
  expect_unused("moe_router_bias_update_rate", model.moe_router_bias_update_rate,
                unused.moe_router_bias_update_rate);
  expect_unused("moe_router_num_groups", model.moe_router_num_groups.value_or(0), int64_t{0});
  expect_unused("moe_router_group_topk", model.moe_router_group_topk.value_or(0), int64_t{0});
  expect_unused("moe_router_topk_scaling_factor", model.moe_router_topk_scaling_factor.value_or(0),
                0.0);
}

void check_unused_fields(const TransformerConfig& model) {
  const TransformerConfig unused;
  // resolve() fills it in without experts too.
  require<ConfigError>(
      !model.moe_ffn_hidden_size || model.moe_ffn_hidden_size == model.ffn_hidden_size,
      "model.moe_ffn_hidden_size: found {}, but model.num_experts is not set; allowed "
      "without it: model.ffn_hidden_size ({})",
      model.moe_ffn_hidden_size.value_or(0), model.ffn_hidden_size.value_or(0));
  if (!model.moe_layer_freq.empty())
    expect_unused("moe_layer_freq", fmt::format("{}", fmt::join(model.moe_layer_freq, ", ")),
                  fmt::format("{}", fmt::join(unused.moe_layer_freq, ", ")));
  expect_unused("moe_shared_expert_intermediate_size",
                model.moe_shared_expert_intermediate_size.value_or(0), int64_t{0});
  check_unused_router_fields(model);
  expect_unused("moe_expert_capacity_factor", model.moe_expert_capacity_factor.value_or(0), 0.0);
  expect_unused("moe_pad_expert_input_to_capacity", model.moe_pad_expert_input_to_capacity,
                unused.moe_pad_expert_input_to_capacity);
  expect_unused<std::string_view>("moe_token_dispatcher_type",
                                  to_string(model.moe_token_dispatcher_type),
                                  to_string(unused.moe_token_dispatcher_type));
}

}  // namespace

bool has_experts(const TransformerConfig& model, int64_t layer) {
  if (!model.num_experts) return false;
  const std::vector<int64_t>& given = model.moe_layer_freq;
  return is_frequency(given) ? layer % given[0] == 0 : given[static_cast<size_t>(layer)] == 1;
}

bool has_dense_layers(const TransformerConfig& model) {
  const std::vector<int64_t>& given = model.moe_layer_freq;
  return !model.num_experts ||
         std::any_of(given.begin(), given.end(), [](int64_t number) { return number != 1; });
}

void check_experts(const TransformerConfig& model, const ParallelConfig& parallel,
                   const FieldNames& names) {
  check_layer_frequency(model);
  if (!model.num_experts) {
    require<ConfigError>(parallel.expert_model_parallel_size == 1,
                         "parallel.expert_model_parallel_size: found {}, allowed without "
                         "model.num_experts: 1",
                         parallel.expert_model_parallel_size);
    return;
  }
  require<ConfigError>(parallel.pipeline_schedule != PipelineScheduleFamily::zb_h1,
                       "parallel.pipeline_schedule: found zb-h1, allowed with model.num_experts: "
                       "1f1b or gpipe");
  check_router(model);
  check_router_groups(model);
  check_layout(model, parallel, names);
}

void check_experts_in_use(const TransformerConfig& model) {
  if (!model.num_experts) return check_unused_fields(model);
  const std::vector<int64_t>& given = model.moe_layer_freq;
  require<ConfigError>(
      given.empty() || is_frequency(given) ||
          std::find(given.begin(), given.end(), 1) != given.end(),
      "model.moe_layer_freq: found no layer with experts ({}), allowed with model.num_experts: one "
      "or more",
      fmt::join(given, ", "));
}

}  // namespace lockstep
