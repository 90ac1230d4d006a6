#pragma once

// Internal.

#include <string>

#include "lockstep/core/config.h"

namespace lockstep {

/// The names that messages use for the fields that resolve() fills in: the field itself if the user
/// has set it, otherwise the field from which its value follows, so that a refusal names something
/// that is in the configuration.
struct FieldNames {
  /// `given` is the configuration before resolve(). Every field of a resolved one counts as set.
  explicit FieldNames(const Config& given);

  std::string num_query_groups = "model.num_query_groups";
  std::string kv_channels = "model.kv_channels";
  std::string ffn_hidden_size = "model.ffn_hidden_size";
  std::string moe_ffn_hidden_size = "model.moe_ffn_hidden_size";
  std::string expert_tensor_parallel_size = "parallel.expert_tensor_parallel_size";
  std::string lr_decay_iters = "optimizer.lr_decay_iters";
  std::string start_weight_decay = "optimizer.start_weight_decay";
  std::string end_weight_decay = "optimizer.end_weight_decay";
};

}  // namespace lockstep
