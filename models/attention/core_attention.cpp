#include "lockstep/models/core_attention.h"

#include <cmath>
#include <limits>

#include <ATen/ATen.h>
#include <ATen/SDPBackend.h>

#include "lockstep/core/planned_cpu.h"
#include "lockstep/core/upload.h"
#include "lockstep/models/context_parallel_blocks.h"
#include "lockstep/models/context_parallel_core.h"
#include "lockstep/models/context_parallel_ring.h"
#include "lockstep/models/input_check.h"

namespace lockstep {
namespace {

/// [sequence, batch, key-heads, channels] -> [batch, heads, sequence, channels]
at::Tensor spread_over_heads(const at::Tensor& heads, int64_t count) {
  const int64_t sequence = heads.size(0), batch = heads.size(1), channels = heads.size(3);
  const int64_t repeats = count / heads.size(2);
  const at::Tensor moved = heads.permute({1, 2, 0, 3});
  if (repeats == 1) return moved;
  return moved.unsqueeze(2)
      .expand({batch, heads.size(2), repeats, sequence, channels})
      .reshape({batch, count, sequence, channels});
}

/// [batch, heads, sequence, channels] -> [sequence, batch, heads * channels]
at::Tensor joined_heads(const at::Tensor& heads) { return heads.permute({2, 0, 1, 3}).flatten(2); }

/// Whether CUDA has a fused kernel that takes fewer key heads than query heads as they are. On the
/// CPU the gain would be too small to justify other bits.
bool has_grouped_kernel(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value) {
  if (key.size(1) == query.size(1)) return false;
  if (query.is_meta()) return plans_gpu() && attention_kernel(query) == AttentionKernel::cuda_flash;
  if (!query.is_cuda()) return false;
  const auto choice = static_cast<at::SDPBackend>(at::_fused_sdp_choice(
      query, key, value, /*attn_mask=*/{}, /*dropout_p=*/0.0, /*is_causal=*/true,
      /*scale=*/std::nullopt, /*enable_gqa=*/true));
  return choice == at::SDPBackend::flash_attention || choice == at::SDPBackend::cudnn_attention;
}

/// [sequences, 1, length, length]: whether two tokens belong to different documents.
at::Tensor of_other_documents(const SequenceDocuments& documents, c10::Device device) {
  std::vector<at::Tensor> numbers;
  for (const std::vector<int64_t>& lengths : documents) {
    const auto count = static_cast<int64_t>(lengths.size());
    numbers.push_back(at::arange(count).repeat_interleave(at::tensor(lengths, at::kLong)));
  }
  const at::Tensor number = upload(at::stack(numbers), device);
  return number.unsqueeze(2).ne(number.unsqueeze(1)).unsqueeze(1);
}

/// libtorch's fused attention; block by block with a window or documents; in separate operations
/// with dropout of the weights.
class LocalAttention : public CoreAttention {
 public:
  LocalAttention(const LayerContext& context, int64_t first_head)
      : dropout_(context.child("core_attention"), context.config.attention_dropout),
        drops_(context.config.attention_dropout > 0),
        first_head_(first_head),
        alone_(context.state.group(GroupKind::cp)),
        window_(context.config.window_size) {}

  at::Tensor forward(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     const TokenPositions& tokens, bool training) const override {
    const int64_t heads = query.size(2), length = query.size(0);
    if (tokens.documents)
      check_sequence_documents(*tokens.documents, query.size(1), length, "attention: documents");
    const bool windowed = window_ && length > *window_;
    if (!drops_ || !training) {
      if (tokens.is_bounded())
        return by_blocks(query, key, value,
                         bounded_gathered_blocks(*tokens.documents, /*ranks=*/1, 0, window_));
      return windowed ? by_blocks(query, key, value,
                                  gathered_blocks({length}, /*ranks=*/1, 0, {.window = window_}))
                      : causal_attention(query, key, value);
    }
    const double scale = 1 / std::sqrt(static_cast<double>(query.size(3)));
    at::Tensor unseen =
        at::ones({length, length}, query.options().dtype(at::kBool)).triu_(/*diagonal=*/1);
    if (windowed) unseen.logical_or_(at::ones_like(unseen).tril_(-*window_));
    if (tokens.is_bounded())
      unseen = unseen.logical_or(of_other_documents(*tokens.documents, query.device()));
    const at::Tensor scores =
        at::matmul(query.permute({1, 2, 0, 3}), spread_over_heads(key, heads).transpose(2, 3))
            .mul(scale)
            .masked_fill(unseen, -std::numeric_limits<double>::infinity());
    const auto wide = query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    const at::Tensor weights = at::softmax(scores, -1, wide).to(query.scalar_type());
    const at::Tensor kept = dropout_.apply_to_attention(weights, tokens, first_head_, training);
    return joined_heads(at::matmul(kept, spread_over_heads(value, heads)));
  }

 private:
  at::Tensor by_blocks(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                       const std::vector<AttentionBlock>& blocks) const {
    return ring_attention(query, key, value, alone_, {blocks}).flatten(2);
  }

  Dropout dropout_;
  bool drops_;
  int64_t first_head_;
  ProcessGroup alone_;
  std::optional<int64_t> window_;
};

}  // namespace

std::shared_ptr<const CoreAttention> make_core_attention(const LayerContext& context,
                                                         int64_t first_head) {
  if (context.parallel.context_parallel_size > 1) return make_context_core_attention(context);
  return std::make_shared<LocalAttention>(context, first_head);
}

at::Tensor causal_attention(const at::Tensor& query, const at::Tensor& key,
                            const at::Tensor& value) {
  const int64_t heads = query.size(2);
  const auto moved = [](const at::Tensor& x) { return x.permute({1, 2, 0, 3}); };
  if (has_grouped_kernel(moved(query), moved(key), moved(value)))
    return joined_heads(at::scaled_dot_product_attention(
        moved(query), moved(key), moved(value), /*attn_mask=*/{}, /*dropout_p=*/0.0,
        /*is_causal=*/true, /*scale=*/std::nullopt, /*enable_gqa=*/true));
  return joined_heads(at::scaled_dot_product_attention(
      moved(query), spread_over_heads(key, heads), spread_over_heads(value, heads),
      /*attn_mask=*/{}, /*dropout_p=*/0.0, /*is_causal=*/true));
}

}  // namespace lockstep
