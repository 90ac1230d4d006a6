// Cross entropy compared with PyTorch's in double: every dtype, vocabularies that are not a
// multiple of a vector or that exceed one tile, columns of several ranks, padding, unaligned
// starts.

#include "lockstep/kernels/cross_entropy.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <optional>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "lockstep/core/error.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep::kernels {
namespace {

constexpr double kNever = -std::numeric_limits<double>::infinity();
const auto kLossDtypes = {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf};

at::Tensor logits_of(int64_t tokens, int64_t width, at::ScalarType dtype = at::kDouble) {
  const at::Tensor x = at::arange(tokens * width, at::kDouble);
  return ((at::sin(x * 0.7) + at::cos(x * 1.3)) * 4).view({tokens, width}).to(dtype);
}

at::Tensor labels_of(int64_t tokens, int64_t vocab_size) {
  const at::Tensor i = at::arange(tokens);
  at::Tensor labels = (i * i * 7 + i).remainder(vocab_size);
  if (tokens > 2) labels[2] = kIgnoredToken;
  return labels;
}

/// `share`: label smoothing as in PyTorch, the share of the mean over all ids.
struct Loss {
  int64_t vocab_size;
  double share = 0;
};

struct Found {
  at::Tensor losses, gradient;
};

/// The result for columns of `ranks`, each with its own padding. Adds up their sums as ranks do.
Found found_of(const at::Tensor& logits, const at::Tensor& labels, const at::Tensor& grads,
               const Loss& loss, int64_t ranks, int64_t padding, bool in_place) {
  const int64_t tokens = logits.size(0), part = (loss.vocab_size + ranks - 1) / ranks;
  CrossEntropySums total = make_cross_entropy_sums(tokens, logits, loss.share > 0);
  total.highest.fill_(kNever);
  total.sums.zero_();
  std::vector<at::Tensor> parts;
  std::vector<TokenColumns> columns;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const int64_t first = std::min(rank * part, loss.vocab_size);
    const int64_t held = std::min(part, loss.vocab_size - first);
    columns.push_back({first, held});
    // One element after an aligned address. The padding must not count.
    const at::Tensor memory = at::full({tokens * (part + padding) + 1}, 100, logits.options());
    parts.push_back(memory.narrow(0, 1, tokens * (part + padding)).view({tokens, part + padding}));
    parts.back().narrow(1, 0, held).copy_(logits.narrow(1, first, held));
    const CrossEntropySums own = make_cross_entropy_sums(tokens, logits, loss.share > 0);
    cross_entropy_sums(parts.back(), labels, columns.back(), own);
    const at::Tensor highest = at::maximum(total.highest, own.highest);
    const auto scaled = [&](const CrossEntropySums& sums) {
      return sums.sums[1] * (sums.highest - highest).exp().nan_to_num(0);
    };
    const at::Tensor exponentials = scaled(total) + scaled(own);
    total.sums.add_(own.sums)[1].copy_(exponentials);
    total.highest.copy_(highest);
  }
  Found found;
  found.losses = cross_entropy_losses(total, labels, loss.vocab_size, loss.share);
  std::vector<at::Tensor> gradients;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const auto r = static_cast<size_t>(rank);
    const at::Tensor result = in_place ? parts[r] : at::full_like(parts[r], 55);
    cross_entropy_gradient(grads, parts[r], labels, columns[r], total, loss.vocab_size, loss.share,
                           result);
    const int64_t held = columns[r].held;
    EXPECT_EQ(result.narrow(1, held, result.size(1) - held).count_nonzero().item<int64_t>(), 0);
    gradients.push_back(result.narrow(1, 0, held));
  }
  found.gradient = at::cat(gradients, 1);
  return found;
}

Found exact_of(const at::Tensor& logits, const at::Tensor& labels, const at::Tensor& grads,
               const Loss& loss) {
  const at::Tensor x = logits.detach().to(at::kDouble).requires_grad_(true);
  const at::Tensor losses = at::cross_entropy_loss(x, labels, /*weight=*/{}, at::Reduction::None,
                                                   kIgnoredToken, loss.share);
  losses.backward(grads.to(at::kDouble));
  return {losses.detach(), x.grad()};
}

double error_between(const at::Tensor& found, const at::Tensor& exact) {
  return exact.numel() == 0 ? 0 : (found.to(at::kDouble) - exact).abs().max().item<double>();
}

void expect_exact(const at::Tensor& logits, const Loss& loss, int64_t ranks, int64_t padding,
                  bool in_place) {
  const at::ScalarType dtype = logits.scalar_type();
  const at::Tensor labels = labels_of(logits.size(0), loss.vocab_size);
  const auto wide = dtype == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor grads = at::cos(at::arange(logits.size(0), wide) + 0.3);
  const Found exact = exact_of(logits, labels, grads, loss);
  const Found found = found_of(logits, labels, grads, loss, ranks, padding, in_place);
  EXPECT_EQ(found.losses.scalar_type(), wide);
  EXPECT_EQ(found.gradient.scalar_type(), dtype);
  EXPECT_LT(error_between(found.losses, exact.losses), dtype == at::kDouble ? 1e-13 : 1e-5);
  // One rounding of a gradient below 1.
  const double rounding = dtype == at::kDouble  ? 1e-15
                          : dtype == at::kFloat ? 4e-7
                          : dtype == at::kHalf  ? 5e-4
                                                : 4e-3;
  EXPECT_LT(error_between(found.gradient, exact.gradient), rounding);
}

TEST(CrossEntropyKernel, EqualsPyTorchInDouble) {
  for (const auto dtype : kLossDtypes)
    for (const int64_t width : {2, 5, 33, 320, 2500})
      for (const double share : {0.0, 0.3})
        for (const int64_t ranks : {1, 3, 4}) {
          SCOPED_TRACE(::testing::Message()
                       << at::toString(dtype) << " " << width << " over " << ranks);
          const at::Tensor logits = logits_of(7, width, dtype);
          expect_exact(logits, {width, share}, ranks, /*padding=*/0, /*in_place=*/true);
          expect_exact(logits, {width, share}, ranks, /*padding=*/3, /*in_place=*/false);
        }
  expect_exact(logits_of(1, 9), {9, 0.1}, 1, 0, true);
  expect_exact(logits_of(0, 9), {9, 0}, 2, 0, true);
}

TEST(CrossEntropyKernel, RuledOutTokenIdsCountForNothing) {
  for (const auto dtype : kLossDtypes) {
    const at::Tensor logits = logits_of(5, 2100, dtype);
    logits.narrow(1, 0, 1030).fill_(kNever);  // the whole first tile and the first rank
    logits[3].narrow(0, 0, 2099).fill_(kNever);
    const at::Tensor labels =
        at::tensor(std::vector<int64_t>{1500, 2099, kIgnoredToken, 2099, 1030});
    const at::Tensor grads = at::ones({5}, dtype == at::kDouble ? at::kDouble : at::kFloat);
    const Found exact = exact_of(logits, labels, grads, {2100});
    for (const int64_t ranks : {1, 3}) {
      const Found found = found_of(logits, labels, grads, {2100}, ranks, 1, true);
      EXPECT_LT(error_between(found.losses, exact.losses), 1e-5);
      EXPECT_LT(error_between(found.gradient, exact.gradient), 4e-3);
      EXPECT_EQ(found.gradient.narrow(1, 0, 1030).count_nonzero().item<int64_t>(), 0);
    }
  }
}

TEST(CrossEntropyKernel, PassesOnWhatIsNoNumberAndLeavesIgnoredTokensAlone) {
  const double bad[] = {std::numeric_limits<double>::quiet_NaN(), -kNever};
  for (const double value : bad) {
    const at::Tensor logits = logits_of(4, 40, at::kFloat);
    logits.select(1, 11).narrow(0, 1, 2).fill_(value);
    const at::Tensor labels = at::tensor(std::vector<int64_t>{3, 11, kIgnoredToken, 2});
    const Found found = found_of(logits, labels, at::ones({4}), {40}, 1, 0, true);
    EXPECT_TRUE(at::equal(found.losses.isnan(), at::tensor({0, 1, 0, 0}, at::kLong).to(at::kBool)))
        << found.losses;
    EXPECT_TRUE(found.gradient[1].isnan().any().item<bool>());
    EXPECT_EQ(found.gradient[2].count_nonzero().item<int64_t>(), 0);
    EXPECT_TRUE(found.gradient[0].isfinite().all().item<bool>());
  }
  // Labels that were not checked.
  const at::Tensor labels = at::tensor({-1, 40, 39, 0}, at::kLong);
  const Found found =
      found_of(logits_of(4, 40), labels, at::ones({4}, at::kDouble), {40}, 2, 0, false);
  EXPECT_TRUE(at::equal(found.losses.isnan(), at::tensor({1, 1, 0, 0}, at::kLong).to(at::kBool)));
}

TEST(CrossEntropyKernel, ATileOrRankWithoutNumbersIsNotPassedOver) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const auto dtype : kLossDtypes) {
    const at::Tensor logits = logits_of(4, 2048, dtype);
    logits.narrow(0, 1, 3).narrow(1, 0, 1024).fill_(kNever);  // the first tile and the first rank
    logits[2].narrow(0, 0, 1024).fill_(nan);
    logits[3][1001].fill_(nan);
    const at::Tensor labels = at::tensor(std::vector<int64_t>{1500, 1500, 1500, 1500});
    const at::Tensor grads = at::ones({4}, dtype == at::kDouble ? at::kDouble : at::kFloat);
    for (const int64_t ranks : {1, 2}) {
      const Found found = found_of(logits, labels, grads, {2048}, ranks, 0, true);
      EXPECT_TRUE(
          at::equal(found.losses.isnan(), at::tensor({0, 0, 1, 1}, at::kLong).to(at::kBool)))
          << at::toString(dtype) << " " << found.losses;
      EXPECT_TRUE(found.gradient.narrow(0, 0, 2).isfinite().all().item<bool>());
      EXPECT_TRUE(found.gradient.narrow(0, 2, 2).isnan().all().item<bool>());
    }
  }
}

TEST(CrossEntropyKernel, EveryNumberOfThreadsGivesTheSameBits) {
  const at::Tensor logits = logits_of(301, 1500, at::kFloat), labels = labels_of(301, 1500);
  const at::Tensor grads = at::ones({301});
  const int threads = at::get_num_threads();
  std::optional<Found> first;
  for (const int count : {1, 2, 3}) {
    at::set_num_threads(count);
    const Found found = found_of(logits, labels, grads, {1500, 0.1}, 1, 0, true);
    if (!first) first = found;
    EXPECT_TRUE(at::equal(found.losses, first->losses));
    EXPECT_TRUE(at::equal(found.gradient, first->gradient));
  }
  at::set_num_threads(threads);
}

TEST(CrossEntropyKernel, ErrorsAreNoLargerThanPyTorchs) {
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    const at::Tensor labels = labels_of(64, 5000), grads = at::ones({64});
    const at::Tensor logits = logits_of(64, 5000, dtype);
    const Found exact = exact_of(logits, labels, grads, {5000});
    const Found found = found_of(logits, labels, grads, {5000}, 1, 0, true);
    const at::Tensor x = logits.clone().requires_grad_(true);
    const at::Tensor losses = at::cross_entropy_loss(x.to(at::kFloat), labels, /*weight=*/{},
                                                     at::Reduction::None, kIgnoredToken);
    losses.backward(grads);
    const auto mean_error = [](const at::Tensor& a, const at::Tensor& b) {
      return (a.detach().to(at::kDouble) - b).abs().mean().item<double>();
    };
    EXPECT_LE(mean_error(found.losses, exact.losses), mean_error(losses, exact.losses))
        << at::toString(dtype);
    EXPECT_LE(mean_error(found.gradient, exact.gradient),
              1.02 * mean_error(x.grad(), exact.gradient))
        << at::toString(dtype);
  }
}

TEST(CrossEntropyKernel, RefusesOtherDtypes) {
  const at::Tensor labels = at::zeros({2}, at::kLong);
  EXPECT_TRUE(lockstep::testing::throws_with<UsageError>(
      [&] {
        cross_entropy_sums(at::ones({2, 4}, at::kLong), labels, {0, 4},
                           make_cross_entropy_sums(2, at::ones({1}), false));
      },
      "cross entropy: found tensors of Long, allowed: Float"));
}

}  // namespace
}  // namespace lockstep::kernels
