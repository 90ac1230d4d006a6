#include "lockstep/models/token_losses.h"

#include <limits>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/models/cross_entropy.h"
#include "lockstep/parallel_state/collectives.h"

namespace lockstep {
namespace {

static_assert(kernels::kIgnoredToken == kIgnoredLabel);

double mean_share(double label_smoothing, int64_t vocab_size) {
  if (label_smoothing == 0) return 0;
  const auto n = static_cast<double>(vocab_size);
  return label_smoothing * n / (n - 1);
}

}  // namespace

TokenLosses::TokenLosses(const char* caller, const VocabPartition& v, const ProcessGroup& g,
                         double label_smoothing)
    : vocabulary(v), group(g), share(mean_share(label_smoothing, vocabulary.vocab_size)) {
  require<UsageError>(v.first >= 0 && v.held >= 0 && v.held <= v.rows &&
                          (v.held == 0 || v.first + v.held <= v.vocab_size),
                      "{}: found a part of the vocabulary of {} rows, {} of them token ids from {} "
                      "on, of {} in all; "
                      "allowed: what vocab_partition() gives",
                      caller, v.rows, v.held, v.first, v.vocab_size);
  require<UsageError>(
      label_smoothing >= 0 && label_smoothing < 1 &&
          (label_smoothing == 0 || vocabulary.vocab_size > 1),
      "{}: found label smoothing {} over {} token ids, allowed: 0, or a share below "
      "1 of at least 2",
      caller, label_smoothing, vocabulary.vocab_size);
}

void TokenLosses::add_over_ranks(const kernels::CrossEntropySums& sums) const {
  if (group.size() == 1) return;
  const at::Tensor own = sums.highest.clone();
  all_reduce(group, sums.highest, ReduceOp::max, "highest logit").wait();
  const at::Tensor none = own.eq(-std::numeric_limits<double>::infinity());
  sums.sums[1].mul_((own - sums.highest).exp_().masked_fill_(none, 0));
  all_reduce(group, sums.sums, ReduceOp::sum, "label's logit and sum of exponentials").wait();
}

at::Tensor TokenLosses::of(const kernels::CrossEntropySums& sums, const at::Tensor& labels) const {
  return kernels::cross_entropy_losses(sums, labels, vocabulary.vocab_size, share);
}

void TokenLosses::gradient(const at::Tensor& grads, const at::Tensor& logits,
                           const at::Tensor& labels, const kernels::CrossEntropySums& sums,
                           const at::Tensor& result) const {
  kernels::cross_entropy_gradient(grads, logits, labels, columns(), sums, vocabulary.vocab_size,
                                  share, result);
}

}  // namespace lockstep
