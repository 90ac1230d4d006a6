#include "lockstep/models/cross_entropy.h"

#include <limits>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "lockstep/core/check.h"
#include "lockstep/models/input_check.h"
#include "lockstep/parallel_state/collectives.h"

namespace lockstep {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// Weight of the mean over all token ids in a loss of which the rest is the label's: s of the
/// others' share is s * n / (n - 1) of the mean.
double mean_share(double label_smoothing, int64_t vocab_size) {
  if (label_smoothing == 0) return 0;
  const auto n = static_cast<double>(vocab_size);
  return label_smoothing * n / (n - 1);
}

at::Tensor max_of_rows(const at::Tensor& logits) {
  if (logits.size(1) > 0) return logits.amax(1);
  return at::full({logits.size(0)}, -std::numeric_limits<double>::infinity(), logits.options());
}

/// NaN where a label is out of bounds that check_token_ids() could not look at.
at::Tensor vouch_for(const at::Tensor& losses, const at::Tensor& labels, const at::Tensor& ignored,
                     int64_t vocab_size) {
  if (labels.is_cpu()) return losses;
  const at::Tensor outside = labels.lt(0).logical_or_(labels.ge(vocab_size));
  losses.masked_fill_(outside.logical_and_(ignored.logical_not()),
                      std::numeric_limits<double>::quiet_NaN());
  return losses;
}

struct VocabParallelCrossEntropy : torch::autograd::Function<VocabParallelCrossEntropy> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& logits,
                            const at::Tensor& labels, const VocabPartition& vocabulary,
                            const ProcessGroup& group, double label_smoothing) {
    const double share = mean_share(label_smoothing, vocabulary.vocab_size);
    const auto wide = logits.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    const at::Tensor held = logits.detach().narrow(1, 0, vocabulary.held).to(wide);
    const at::Tensor highest = max_of_rows(held);
    all_reduce(group, highest, ReduceOp::max, "highest logit").wait();

    at::Tensor softmax = held - highest.unsqueeze(1);
    at::Tensor column = labels - vocabulary.first;
    const at::Tensor here = column.ge(0).logical_and_(column.lt(vocabulary.held));
    const at::Tensor elsewhere = here.logical_not();
    column = column.masked_fill(elsewhere, 0).unsqueeze(1);
    at::Tensor sums = at::zeros({share > 0 ? 3 : 2, labels.size(0)}, softmax.options());
    if (vocabulary.held > 0)  // a product with 0 would turn an infinite logit into NaN
      sums[0].copy_(softmax.gather(1, column).squeeze(1).masked_fill_(elsewhere, 0));
    if (share > 0) sums[2].copy_(softmax.sum(1));
    softmax.exp_();
    sums[1].copy_(softmax.sum(1));
    all_reduce(group, sums, ReduceOp::sum, "label's logit and sum of exponentials").wait();

    softmax.div_(sums[1].unsqueeze(1));
    const at::Tensor ignored = labels.eq(kIgnoredLabel);
    context->save_for_backward({softmax, column, here, ignored});
    context->saved_data["share"] = share;
    context->saved_data["vocab_size"] = vocabulary.vocab_size;
    context->saved_data["rows"] = vocabulary.rows;
    context->saved_data["dtype"] = static_cast<int64_t>(logits.scalar_type());
    const at::Tensor log_sum = sums[1].log();
    at::Tensor losses = log_sum - sums[0] * (1 - share);
    if (share > 0) losses -= sums[2] * (share / static_cast<double>(vocabulary.vocab_size));
    losses.masked_fill_(ignored, 0);
    return vouch_for(losses, labels, ignored, vocabulary.vocab_size);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    require<UsageError>(!at::GradMode::is_enabled(),
                        "vocab_parallel_cross_entropy: found backward with create_graph, allowed: "
                        "without; there is no second derivative");
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &softmax = saved[0], &column = saved[1], &here = saved[2];
    const double share = context->saved_data["share"].toDouble();
    const int64_t rows = context->saved_data["rows"].toInt();
    const auto dtype = static_cast<at::ScalarType>(context->saved_data["dtype"].toInt());
    const at::Tensor scale = grads[0].masked_fill(saved[3], 0).unsqueeze(1);

    const bool padded = rows != softmax.size(1);
    at::Tensor result =
        padded ? at::zeros({softmax.size(0), rows}, softmax.options()) : at::empty_like(softmax);
    at::Tensor held = result.narrow(1, 0, softmax.size(1));
    at::mul_out(held, softmax, scale);
    if (share > 0)
      held.sub_(scale * (share / static_cast<double>(context->saved_data["vocab_size"].toInt())));
    if (softmax.size(1) > 0) held.scatter_add_(1, column, scale * here.unsqueeze(1) * (share - 1));
    return {result.to(dtype), {}, {}, {}, {}};
  }
};

}  // namespace

at::Tensor vocab_parallel_cross_entropy(const at::Tensor& logits, const at::Tensor& labels,
                                        const VocabPartition& vocabulary, const ProcessGroup& group,
                                        double label_smoothing) {
  require<UsageError>(
      logits.dim() == 2 && logits.size(1) == vocabulary.rows && labels.dim() == 1 &&
          labels.size(0) == logits.size(0) && at::isFloatingType(logits.scalar_type()) &&
          labels.scalar_type() == at::kLong,
      "vocab_parallel_cross_entropy: found logits {} and labels {}, allowed: [tokens, {}] of a "
      "floating-point dtype and [tokens] of Long",
      form_of(logits), form_of(labels), vocabulary.rows);
  require<UsageError>(label_smoothing >= 0 && label_smoothing < 1 &&
                          (label_smoothing == 0 || vocabulary.vocab_size > 1),
                      "vocab_parallel_cross_entropy: found label smoothing {} over {} token ids, "
                      "allowed: 0, or a share below 1 of at least 2",
                      label_smoothing, vocabulary.vocab_size);
  check_token_ids(labels, vocabulary.vocab_size, /*may_be_ignored=*/true,
                  "vocab_parallel_cross_entropy: labels");
  if (group.size() > 1 || label_smoothing > 0)
    return VocabParallelCrossEntropy::apply(logits, labels, vocabulary, group, label_smoothing);
  const at::Tensor wide = logits.scalar_type() == at::kDouble ? logits : logits.to(at::kFloat);
  return at::cross_entropy_loss(wide.narrow(1, 0, vocabulary.held), labels, /*weight=*/{},
                                at::Reduction::None, kIgnoredLabel);
}

void check_token_ids(const at::Tensor& ids, int64_t vocab_size, bool may_be_ignored,
                     const char* what) {
  if (ids.numel() == 0 || !ids.is_cpu()) return;
  const at::Tensor good = ids.ge(0).logical_and_(ids.lt(vocab_size));
  if (may_be_ignored) good.logical_or_(ids.eq(kIgnoredLabel));
  if (good.all().item<bool>()) return;
  fail<UsageError>(
      "{}: found token id {}, allowed: 0 to {}{}", what,
      ids.masked_select(good.logical_not())[0].item<int64_t>(), vocab_size - 1,
      may_be_ignored ? fmt::format(", or {} for a token without loss", kIgnoredLabel) : "");
}

}  // namespace lockstep
