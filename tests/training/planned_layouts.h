#pragma once

#include <string>
#include <vector>

#include "lockstep/core/config_io.h"

/// Jobs of the reference GPT that are planned, and their layouts.
namespace lockstep::testing {

using Overrides = std::vector<std::string>;

inline Config config_of(const Overrides& overrides) {
  return parse_config(
      "model { num_layers: 4 hidden_size: 16 num_attention_heads: 4 ffn_hidden_size: 16 "
      "seq_length: 16 vocab_size: 256 make_vocab_size_divisible_by: 1 } "
      "train { global_batch_size: 16 micro_batch_size: 1 eval_iters: 1 train_iters: 10 } "
      "data { mock: true } "
      "optimizer { lr: 0.01 clip_grad: 0.5 lr_decay_style: \"constant\" }",
      "test", overrides);
}

inline const Overrides kExperts = {"model.num_experts=4", "model.moe_aux_loss_coeff=0.05",
                                   "model.moe_z_loss_coeff=0.001"};

inline Overrides with(Overrides first, const Overrides& more) {
  first.insert(first.end(), more.begin(), more.end());
  return first;
}

inline Overrides layout(const Overrides& fields) {
  Overrides list;
  for (const std::string& field : fields) list.push_back("parallel." + field);
  return list;
}

inline const char *const
    kTensor = "tensor_model_parallel_size=2",
    *const kPipeline = "pipeline_model_parallel_size=2",
    *const kContext = "context_parallel_size=2", *const kExpert = "expert_model_parallel_size=2",
    *const kSequence = "sequence_parallel=true", *const kOverlap = "tp_comm_overlap=true",
    *const kVirtual = "virtual_pipeline_model_parallel_size=2";
inline const Overrides kSharded = {"ddp.use_distributed_optimizer=true",
                                   "ddp.overlap_param_gather=true", "ddp.bucket_size=1000"};

}  // namespace lockstep::testing
