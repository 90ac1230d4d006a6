#include "lockstep/training/generate.h"

#include <cmath>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/core/philox.h"
#include "lockstep/training/evaluation_mode.h"

namespace lockstep {
namespace {

void check(const std::vector<int64_t>& prompt, const GenerateOptions& options) {
  require<ConfigError>(!prompt.empty(), "--prompt: is empty, allowed: at least one token");
  require<ConfigError>(options.max_tokens >= 0, "--max-tokens: found {}, allowed: >= 0",
                       options.max_tokens);
  require<ConfigError>(std::isfinite(options.temperature) && options.temperature >= 0,
                       "--temperature: found {}, allowed: >= 0", options.temperature);
  require<ConfigError>(options.top_k >= 0, "--top-k: found {}, allowed: >= 0", options.top_k);
}

/// A token of `logits` [vocabulary] for a `uniform` number in [0, 1).
int64_t sample(const at::Tensor& logits, const GenerateOptions& options, double uniform) {
  if (options.temperature == 0) return logits.argmax().item<int64_t>();
  const int64_t count =
      options.top_k == 0 ? logits.numel() : std::min(options.top_k, logits.numel());
  const auto [values, ids] = logits.topk(count);
  const at::Tensor sums = at::softmax(values / options.temperature, 0).cumsum(0);
  const int64_t place = sums.le(uniform * sums[-1].item<double>()).sum().item<int64_t>();
  return ids[std::min(place, count - 1)].item<int64_t>();
}

}  // namespace

std::vector<int64_t> generate(const GPTModel& model, std::vector<int64_t> prompt,
                              const GenerateOptions& options,
                              const std::function<void(int64_t)>& on_token) {
  check(prompt, options);
  const at::NoGradGuard no_grad;
  const EvaluationMode evaluation(model);
  const c10::Device device = model.parameters().front().device();
  const auto window = static_cast<size_t>(model.config().seq_length);
  const CounterStream random(options.seed, "generate");
  std::vector<int64_t> generated;
  for (int64_t i = 0; i < options.max_tokens; ++i) {
    const size_t length = std::min(window, prompt.size());
    const at::Tensor context =
        at::tensor(at::ArrayRef<int64_t>(prompt).slice(prompt.size() - length), at::kLong)
            .unsqueeze(0)
            .to(device);
    const at::Tensor logits = model.forward(context)[0][-1].to(at::kDouble).cpu();
    require<UsageError>(!at::isnan(logits).any().item<bool>(),
                        "generate: logits of token {}: found NaN, allowed: numbers", i);
    const double uniform =
        static_cast<double>(random.bits(static_cast<uint64_t>(i)) >> 11) * 0x1p-53;
    const int64_t token = sample(logits, options, uniform);
    prompt.push_back(token);
    generated.push_back(token);
    if (on_token) on_token(token);
  }
  return generated;
}

}  // namespace lockstep
