#include "lockstep/models/cross_entropy.h"

#include <algorithm>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "lockstep/core/check.h"
#include "lockstep/models/input_check.h"
#include "lockstep/models/token_losses.h"

namespace lockstep {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// The data that backward needs in addition to tensors of the graph.
struct CrossEntropyCall : torch::CustomClassHolder {
  CrossEntropyCall(const TokenLosses& l, LogitsMemory m) : losses(l), memory(m) {}
  TokenLosses losses;
  LogitsMemory memory;
  bool taken = false;  ///< whether the gradient has replaced the logits
};

struct VocabParallelCrossEntropy : torch::autograd::Function<VocabParallelCrossEntropy> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& logits,
                            const at::Tensor& labels,
                            const c10::intrusive_ptr<CrossEntropyCall>& call) {
    const TokenLosses& losses = call->losses;
    const at::Tensor held = logits.contiguous();
    kernels::CrossEntropySums sums =
        kernels::make_cross_entropy_sums(labels.size(0), held, losses.share > 0);
    kernels::cross_entropy_sums(held, labels, losses.columns(), sums);
    losses.add_over_ranks(sums);
    at::Tensor result = losses.of(sums, labels);
    context->save_for_backward({held, labels, sums.highest, sums.sums});
    context->saved_data["call"] = c10::IValue::make_capsule(call);
    return result;
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    require<UsageError>(!at::GradMode::is_enabled(),
                        "vocab_parallel_cross_entropy: found backward with create_graph, allowed: "
                        "without; there is no second derivative");
    const auto capsule = context->saved_data["call"].toCapsule();
    auto& call = static_cast<CrossEntropyCall&>(*capsule);
    require<UsageError>(!call.taken,
                        "vocab_parallel_cross_entropy: found a second backward with "
                        "LogitsMemory::taken, allowed: one; the gradient stands where the logits "
                        "were");
    const variable_list saved = context->get_saved_variables();
    const at::Tensor& logits = saved[0];
    call.taken = call.memory == LogitsMemory::taken;
    at::Tensor result = call.taken ? logits.detach() : at::empty_like(logits);
    call.losses.gradient(grads[0], logits, saved[1], {saved[2], saved[3]}, result);
    return {result, {}, {}};
  }
};

}  // namespace

at::Tensor vocab_parallel_cross_entropy(const at::Tensor& logits, const at::Tensor& labels,
                                        const VocabPartition& vocabulary, const ProcessGroup& group,
                                        double label_smoothing, LogitsMemory memory) {
  require<UsageError>(
      logits.dim() == 2 && logits.size(1) == vocabulary.rows && labels.dim() == 1 &&
          labels.size(0) == logits.size(0) && at::isFloatingType(logits.scalar_type()) &&
          labels.scalar_type() == at::kLong,
      "vocab_parallel_cross_entropy: found logits {} and labels {}, allowed: [tokens, {}] of a "
      "floating-point dtype and [tokens] of Long",
      form_of(logits), form_of(labels), vocabulary.rows);
  const TokenLosses losses("vocab_parallel_cross_entropy", vocabulary, group, label_smoothing);
  check_token_ids(labels, vocabulary.vocab_size, /*may_be_ignored=*/true,
                  "vocab_parallel_cross_entropy: labels");
  return VocabParallelCrossEntropy::apply(logits, labels,
                                          c10::make_intrusive<CrossEntropyCall>(losses, memory));
}

void check_token_ids(const at::Tensor& ids, int64_t vocab_size, bool may_be_ignored,
                     const char* what) {
  if (ids.numel() == 0 || !ids.is_cpu()) return;
  const at::Tensor list = ids.contiguous();
  const int64_t *const first = list.const_data_ptr<int64_t>(), *const end = first + list.numel();
  const int64_t* const bad = std::find_if(first, end, [=](int64_t id) {
    return (id < 0 || id >= vocab_size) && !(may_be_ignored && id == kIgnoredLabel);
  });
  if (bad == end) return;
  fail<UsageError>(
      "{}: found token id {}, allowed: 0 to {}{}", what, *bad, vocab_size - 1,
      may_be_ignored ? fmt::format(", or {} for a token without loss", kIgnoredLabel) : "");
}

}  // namespace lockstep
