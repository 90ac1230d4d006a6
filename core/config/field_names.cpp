#include "lockstep/core/field_names.h"

#include "lockstep/core/check.h"

namespace lockstep {

FieldNames::FieldNames(const Config& given) {
  const TransformerConfig& model = given.model;
  const OptimizerConfig& optimizer = given.optimizer;
  if (!model.num_query_groups) num_query_groups = "model.num_attention_heads";
  if (!model.kv_channels && model.multi_latent_attention)
    kv_channels = "model.qk_head_dim + model.qk_pos_emb_head_dim";
  else if (!model.kv_channels)
    kv_channels = fmt::format("model.hidden_size / model.num_attention_heads ({} / {})",
                              model.hidden_size, model.num_attention_heads);
  if (!model.ffn_hidden_size) ffn_hidden_size = "4 * model.hidden_size";
  if (!model.moe_ffn_hidden_size) moe_ffn_hidden_size = ffn_hidden_size;
  if (!given.parallel.expert_tensor_parallel_size)
    expert_tensor_parallel_size = "parallel.tensor_model_parallel_size";
  if (!optimizer.lr_decay_iters)
    lr_decay_iters = given.train.train_iters > optimizer.lr_warmup_iters
                         ? "train.train_iters"
                         : "optimizer.lr_warmup_iters + 1";
  if (!optimizer.start_weight_decay) start_weight_decay = "optimizer.weight_decay";
  if (!optimizer.end_weight_decay) end_weight_decay = "optimizer.weight_decay";
}

}  // namespace lockstep
