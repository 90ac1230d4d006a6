#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

#include "lockstep/models/vocab_partition.h"
#include "lockstep/parallel_state/process_group.h"

namespace lockstep {

/// The label of a token whose loss is 0 and has no gradient, as in PyTorch.
inline constexpr int64_t kIgnoredLabel = -100;

/// Who owns the memory of the logits once their losses are known.
enum class LogitsMemory {
  kept,   ///< the caller: the logits do not change
  taken,  ///< backward, which writes the gradient there: nobody may read the logits then
};

/// -log softmax(logits)[label] for each token, in nats, where each rank of `group` holds the
/// columns `vocabulary` of the logits. `logits` [tokens, vocabulary.rows]; `labels` [tokens] of
/// int64, the same on all ranks, in 0 ... vocab_size - 1 or kIgnoredLabel -> [tokens], the same on
/// all ranks, in fp32, or fp64 for fp64 logits. No reduction: the caller sums over the tokens and
/// counts them. Padding does not take part, and its gradient is 0. Forward does not change
/// `logits`.
///
/// `label_smoothing` s in [0, 1): the target is 1 - s for the label and s / (vocab_size - 1) for
/// each of the other token ids, as in Megatron Core (PyTorch spreads s over all token ids, s /
/// vocab_size each). s > 0 needs at least two token ids.
///
/// In a group of several ranks forward does two all-reduces: the maximum of one number per token,
/// and the sum of two numbers per token (three with smoothing). Backward sends nothing. The logits
/// and the sums are kept for backward. Backward with create_graph is a UsageError; so is a second
/// backward of the same forward if the logits were taken. UsageError names invalid shapes, dtypes
/// and labels before anything is sent. Labels on a device are not checked, because that would wait
/// for the device: an invalid label gives NaN there.
at::Tensor vocab_parallel_cross_entropy(const at::Tensor& logits, const at::Tensor& labels,
                                        const VocabPartition& vocabulary, const ProcessGroup& group,
                                        double label_smoothing = 0,
                                        LogitsMemory memory = LogitsMemory::kept);

/// UsageError, naming `what`, unless every element of `ids` [any shape] of int64 is in 0 ...
/// vocab_size - 1, or kIgnoredLabel where `may_be_ignored`. Ids on a device are not checked,
/// because that would wait for the device; check them before you copy them there.
void check_token_ids(const at::Tensor& ids, int64_t vocab_size, bool may_be_ignored,
                     const char* what);

}  // namespace lockstep
