#include "lockstep/kernels/cross_entropy.h"

#include <algorithm>

#include <ATen/ATen.h>

#include "lockstep/core/parallel_for.h"
#include "lockstep/kernels/cross_entropy_loop.h"
#include "lockstep/kernels/cross_entropy_operands.h"
#include "lockstep/kernels/layer_kernels.h"

namespace lockstep::kernels {
namespace {

constexpr int64_t kLogitsOfThread = 1 << 14, kTokensOfThread = 1 << 10;

int64_t rows_of_thread(const LossColumns& columns) {
  return std::max<int64_t>(1, kLogitsOfThread / std::max<int64_t>(1, columns.width));
}

}  // namespace

void cross_entropy_cpu(const CrossEntropyTensors& t) {
  for_storage("cross entropy", t.logits.scalar_type(), [&](auto element) {
    const auto rows = t.rows<decltype(element)>();
    parallel_for(0, t.num_tokens(), rows_of_thread(t.columns), [&](int64_t first, int64_t end) {
      cross_entropy_loop(t.smoothed(), rows, first, end);
    });
  });
}

void cross_entropy_losses_cpu(const CrossEntropyTensors& t) {
  const auto run = [&](const auto& tokens) {
    parallel_for(0, t.num_tokens(), kTokensOfThread, [&](int64_t first, int64_t end) {
      cross_entropy_losses_loop(tokens, first, end);
    });
  };
  if (t.losses.scalar_type() == at::kDouble) return run(t.token_losses<double>());
  run(t.token_losses<float>());
}

void cross_entropy_gradient_cpu(const CrossEntropyTensors& t) {
  for_storage("cross entropy", t.logits.scalar_type(), [&](auto element) {
    const auto rows = t.gradient_rows<decltype(element)>();
    parallel_for(0, t.num_tokens(), rows_of_thread(t.columns), [&](int64_t first, int64_t end) {
      cross_entropy_gradient_loop(rows, first, end);
    });
  });
}

CrossEntropySums make_cross_entropy_sums(int64_t tokens, const at::Tensor& logits, bool smoothed) {
  const auto options = logits.options().dtype(wide_dtype(logits.scalar_type()));
  return {at::empty({tokens}, options), at::empty({smoothed ? 3 : 2, tokens}, options)};
}

void cross_entropy_sums(const at::Tensor& logits, const at::Tensor& labels,
                        const TokenColumns& columns, const CrossEntropySums& sums) {
  if (labels.numel() == 0) return;
  const c10::DeviceGuard guard(logits.device());
  layer_kernels("cross entropy", logits)
      .cross_entropy({.logits = logits.detach().contiguous(),
                      .labels = labels.contiguous(),
                      .sums = sums,
                      .columns = {logits.size(1), columns.first, columns.held}});
}

at::Tensor cross_entropy_losses(const CrossEntropySums& sums, const at::Tensor& labels,
                                int64_t vocab_size, double share) {
  at::Tensor losses = at::empty_like(sums.highest);
  if (labels.numel() == 0) return losses;
  const c10::DeviceGuard guard(losses.device());
  layer_kernels("cross entropy", losses)
      .cross_entropy_losses({.labels = labels.contiguous(),
                             .sums = sums,
                             .losses = losses,
                             .vocab_size = vocab_size,
                             .share = share});
  return losses;
}

void cross_entropy_gradient(const at::Tensor& grads, const at::Tensor& logits,
                            const at::Tensor& labels, const TokenColumns& columns,
                            const CrossEntropySums& sums, int64_t vocab_size, double share,
                            const at::Tensor& result) {
  if (logits.numel() == 0) return;
  const c10::DeviceGuard guard(logits.device());
  layer_kernels("cross entropy", logits)
      .cross_entropy_gradient({.logits = logits.detach().contiguous(),
                               .labels = labels.contiguous(),
                               .sums = sums,
                               .grads = grads.contiguous(),
                               .result = result,
                               .columns = {logits.size(1), columns.first, columns.held},
                               .vocab_size = vocab_size,
                               .share = share});
}

}  // namespace lockstep::kernels
