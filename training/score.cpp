#include "lockstep/training/score.h"

#include <algorithm>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/training/evaluation_mode.h"

namespace lockstep {
namespace {

constexpr int64_t kMostTokens = 16384;

int64_t read_length(const ScoreTokens& request) {
  return static_cast<int64_t>(request.ids.size()) - 1;
}

Score score_of(const at::Tensor& logits, const ScoreTokens& request) {
  const int64_t length = read_length(request), scored = request.scored;
  const at::Tensor own = logits.narrow(0, length - scored, scored).to(at::kDouble);
  require<UsageError>(!at::isnan(own).any().item<bool>(),
                      "score: logits: found NaN, allowed: numbers");
  const at::Tensor ids = at::tensor(request.ids, at::kLong).slice(0, -scored).to(logits.device());
  const at::Tensor chosen = at::log_softmax(own, 1).gather(1, ids.unsqueeze(1));
  return {chosen.sum().item<double>(), own.argmax(1).eq(ids).all().item<bool>()};
}

}  // namespace

std::vector<Score> score(const GPTModel& model, const std::vector<ScoreTokens>& requests) {
  const at::NoGradGuard no_grad;
  const EvaluationMode evaluation(model);
  const c10::Device device = model.parameters().front().device();
  std::vector<size_t> order;
  for (size_t i = 0; i < requests.size(); ++i)
    if (requests[i].scored > 0) order.push_back(i);
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return read_length(requests[a]) > read_length(requests[b]);
  });
  std::vector<Score> scores(requests.size(), {.logprob = 0, .is_greedy = true});
  for (size_t first = 0; first < order.size();) {
    const int64_t length = read_length(requests[order[first]]);
    const int64_t most = std::min(kMostTokens, kMostLogits / model.config().vocab_size) / length;
    const size_t last =
        std::min(order.size(), first + static_cast<size_t>(std::max<int64_t>(1, most)));
    const at::Tensor tokens = at::zeros({static_cast<int64_t>(last - first), length}, at::kLong);
    for (size_t i = first; i < last; ++i) {
      const std::vector<int64_t>& ids = requests[order[i]].ids;
      const int64_t own = read_length(requests[order[i]]);
      tokens[static_cast<int64_t>(i - first)].narrow(0, 0, own).copy_(
          at::tensor(ids, at::kLong).narrow(0, 0, own));
    }
    const at::Tensor logits = model.forward(tokens.to(device));
    for (size_t i = first; i < last; ++i)
      scores[order[i]] = score_of(logits[static_cast<int64_t>(i - first)], requests[order[i]]);
    first = last;
  }
  return scores;
}

}  // namespace lockstep
