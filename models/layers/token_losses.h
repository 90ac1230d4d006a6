#pragma once

// Internal: what the losses of tokens have in common, wherever the logits come from.

#include <ATen/core/Tensor.h>

#include "lockstep/kernels/cross_entropy.h"
#include "lockstep/models/vocab_partition.h"
#include "lockstep/parallel_state/process_group.h"

namespace lockstep {

/// Cross entropy over a vocabulary that the ranks of a group share.
struct TokenLosses {
  VocabPartition vocabulary;
  ProcessGroup group;
  /// Weight of the mean over all token ids in a loss; the rest of the weight is the label's. A
  /// share s of the other ids is s * n / (n - 1) of the mean.
  double share;

  /// UsageError, naming `caller`: a label smoothing that is not allowed.
  TokenLosses(const char* caller, const VocabPartition& vocabulary, const ProcessGroup& group,
              double label_smoothing);

  kernels::TokenColumns columns() const { return {vocabulary.first, vocabulary.held}; }

  /// Sums over this rank's columns -> sums over all: two all-reduces, none in a group of one.
  void add_over_ranks(const kernels::CrossEntropySums& sums) const;

  /// The losses from sums over all ranks: [tokens].
  at::Tensor of(const kernels::CrossEntropySums& sums, const at::Tensor& labels) const;

  /// Computes the gradient of `logits` from that of the losses, into `result`; see
  /// cross_entropy_gradient().
  void gradient(const at::Tensor& grads, const at::Tensor& logits, const at::Tensor& labels,
                const kernels::CrossEntropySums& sums, const at::Tensor& result) const;
};

}  // namespace lockstep
