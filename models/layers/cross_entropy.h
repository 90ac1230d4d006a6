#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

#include "lockstep/models/vocab_partition.h"
#include "lockstep/parallel_state/process_group.h"

namespace lockstep {

/// The label of a token whose loss is 0 and has no gradient, as in PyTorch.
inline constexpr int64_t kIgnoredLabel = -100;

/// Whose the memory of the logits is once their losses are known.
enum class LogitsMemory {
  kept,   ///< the caller's: they stay as they are
  taken,  ///< backward's, which writes the gradient there: nobody may read the logits then
};

/// -log softmax(logits)[label] for each token, in nats, where each rank of `group` has the columns
/// `vocabulary` of the logits. `logits` [tokens, vocabulary.rows]; `labels` [tokens] of int64, the
/// same on all ranks, in 0 ... vocab_size - 1 or kIgnoredLabel -> [tokens], the same on all ranks,
/// in fp32, or fp64 for fp64 logits. No reduction: the sum over tokens and their number belong to
/// the caller. Padding takes no part, and its gradient is 0. Forward leaves `logits` as it is.
///
/// `label_smoothing` s in [0, 1): the target is 1 - s for the label and s / (vocab_size - 1) for
/// each of the other token ids, as in Megatron Core (where PyTorch has s / vocab_size for all). A
/// share above 0 needs at least two token ids.
///
/// In a group of several ranks forward is two all-reduces, the maximum of one number a token and
/// the sum of two (three with smoothing) of them; backward sends nothing. It keeps the logits and
/// the sums. Backward with create_graph is a UsageError; so is a second backward of the same
/// forward where the logits were taken. UsageError names shapes, dtypes and labels that are not
/// allowed, before anything is sent. On a device nothing waits for it: a label that is not allowed
/// gives NaN there.
at::Tensor vocab_parallel_cross_entropy(const at::Tensor& logits, const at::Tensor& labels,
                                        const VocabPartition& vocabulary, const ProcessGroup& group,
                                        double label_smoothing = 0,
                                        LogitsMemory memory = LogitsMemory::kept);

/// UsageError, naming `what`, unless every element of `ids` [any shape] of int64 is in 0 ...
/// vocab_size - 1, or kIgnoredLabel where `may_be_ignored`. Ids on a device are not looked at, as
/// that would wait for it: check them before they are copied there.
void check_token_ids(const at::Tensor& ids, int64_t vocab_size, bool may_be_ignored,
                     const char* what);

}  // namespace lockstep
