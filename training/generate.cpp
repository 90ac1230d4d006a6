#include "lockstep/training/generate.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/core/philox.h"
#include "lockstep/models/key_value_cache.h"
#include "lockstep/parallel_state/collectives.h"
#include "lockstep/training/evaluation_mode.h"

namespace lockstep {
namespace {

using TokenLists = std::vector<std::vector<int64_t>>;

void check(const TokenLists& prompts, const GenerateOptions& options, int64_t vocab_size) {
  for (const auto& prompt : prompts) {
    const std::string problem = problem_of_prompt(prompt, vocab_size);
    require<ConfigError>(problem.empty(), "--prompt: {}", problem);
  }
  require<ConfigError>(options.max_tokens >= 0, "--max-tokens: found {}, allowed: >= 0",
                       options.max_tokens);
  require<ConfigError>(std::isfinite(options.temperature) && options.temperature >= 0,
                       "--temperature: found {}, allowed: >= 0", options.temperature);
  require<ConfigError>(options.top_k >= 0, "--top-k: found {}, allowed: >= 0", options.top_k);
  require<ConfigError>(options.top_p > 0 && options.top_p <= 1,
                       "--top-p: found {}, allowed: > 0 and <= 1", options.top_p);
  require<ConfigError>(options.vocabulary_size.value_or(1) >= 1,
                       "generate: vocabulary_size: found {}, allowed: >= 1",
                       options.vocabulary_size.value_or(1));
}

/// Descending logits over the temperature. If the largest overflows, all are taken relative to it,
/// which leaves the probabilities the same.
at::Tensor scaled(const at::Tensor& values, double temperature) {
  const at::Tensor quotients = values / temperature;
  if (std::isfinite(quotients[0].item<double>())) return quotients;
  return (values - values[0]).nan_to_num(0.0) / temperature;
}

/// Draws an index of `logits` [ids] with a `uniform` number in [0, 1).
int64_t sample(const at::Tensor& logits, const GenerateOptions& options, double uniform) {
  if (options.temperature == 0) return logits.argmax().item<int64_t>();
  int64_t count = options.top_k == 0 ? logits.numel() : std::min(options.top_k, logits.numel());
  const auto [values, ids] = logits.topk(count);
  const at::Tensor probabilities = at::softmax(scaled(values, options.temperature), 0);
  at::Tensor sums = probabilities.cumsum(0);
  if (options.top_p < 1) {
    count = (sums - probabilities).lt(options.top_p).sum().item<int64_t>();
    sums = sums.narrow(0, 0, count);
  }
  const int64_t place = sums.le(uniform * sums[-1].item<double>()).sum().item<int64_t>();
  return ids[std::min(place, count - 1)].item<int64_t>();
}

/// The ids that can be drawn from a vocabulary of `vocab_size`, ascending.
at::Tensor drawn_ids(const GenerateOptions& options, int64_t vocab_size) {
  const int64_t below = std::min(options.vocabulary_size.value_or(vocab_size), vocab_size);
  std::vector<int64_t> ids(static_cast<size_t>(below));
  std::iota(ids.begin(), ids.end(), 0);
  ids.insert(ids.end(), options.ends.lower_bound(below), options.ends.lower_bound(vocab_size));
  return at::tensor(ids, at::kLong);
}

/// Sequences of different lengths that the model reads together.
class Sequences {
 public:
  Sequences(const GPTModel& model, const TokenLists& prompts, const GenerateOptions& options,
            const ParallelState& state)
      : model_(model), state_(state), options_(model.parameters().front().options()) {
    size_t longest = 0;
    for (const auto& prompt : prompts) {
      longest = std::max(longest, prompt.size());
      lengths_.push_back(static_cast<int64_t>(prompt.size()));
    }
    // A text may end long before max_tokens, which only bounds it: add() makes room for more.
    const int64_t window = model.config().seq_length;
    const int64_t capacity = static_cast<int64_t>(longest) + std::min(options.max_tokens, window);
    tokens_ = at::zeros({static_cast<int64_t>(prompts.size()), capacity}, at::kLong);
    for (size_t i = 0; i < prompts.size(); ++i)
      row(i).narrow(0, 0, lengths_[i]).copy_(at::tensor(prompts[i], at::kLong));
    if (options.use_cache) cache_ = std::make_shared<KeyValueCache>(std::min(window, capacity));
  }

  int64_t length(size_t i) const { return lengths_[i]; }

  void add(size_t i, int64_t token) {
    if (lengths_[i] == tokens_.size(1))
      tokens_ = at::constant_pad_nd(tokens_, {0, tokens_.size(1)});
    row(i)[lengths_[i]++].fill_(token);
  }

  /// Logits [batch, vocabulary] after the first `length` tokens of each, which must not be fewer
  /// than before. Missing tokens count as token 0.
  at::Tensor logits_after(int64_t length) {
    const int64_t window = model_.config().seq_length;
    const bool cached = cache_ && length <= window;
    const int64_t first = cached ? cache_->length() : std::max<int64_t>(0, length - window);
    GPTInput input = input_of(first, length);
    if (cached) input.positions.cache = cache_;
    input.last_only = true;
    const at::Tensor output = model_.forward(input);
    const bool has_logits = model_.stage().has_loss;
    if (!has_logits) send_on(output);
    const at::Tensor logits = has_logits ? output.squeeze(1).to(at::kDouble).contiguous()
                                         : at::empty({tokens_.size(0), model_.config().vocab_size},
                                                     options_.dtype(at::kDouble));
    // The last rank is on the last stage. All ranks take its bits, so that none diverges.
    if (state_.world_size() > 1)
      broadcast(state_.world(), logits, state_.world_size() - 1, kLogits).wait();
    return logits.cpu();
  }

 private:
  static constexpr const char* kHidden = "hidden of generated tokens";
  static constexpr const char* kLogits = "logits of generated tokens";

  /// The input for the tokens from `first` to `length`: the tokens, or the stage before's output.
  GPTInput input_of(int64_t first, int64_t length) const {
    if (model_.stage().has_embedding)
      return {.tokens = tokens_.slice(1, first, length).to(options_.device())};
    const ProcessGroup stages = state_.group(GroupKind::pp);
    const at::Tensor hidden =
        at::empty({length - first, tokens_.size(0), model_.config().hidden_size}, options_);
    receive(stages, hidden, stages.rank() - 1, kHidden).wait();
    return {.hidden = hidden};
  }

  void send_on(const at::Tensor& hidden) const {
    const ProcessGroup stages = state_.group(GroupKind::pp);
    send(stages, hidden.contiguous(), stages.rank() + 1, kHidden).wait();
  }

  at::Tensor row(size_t i) const { return tokens_[static_cast<int64_t>(i)]; }

  const GPTModel& model_;
  const ParallelState& state_;
  at::TensorOptions options_;  ///< of the parameters
  at::Tensor tokens_;          ///< [batch, capacity] of int64 on the CPU
  std::vector<int64_t> lengths_;
  std::shared_ptr<KeyValueCache> cache_;
};

}  // namespace

std::string problem_of_prompt(const std::vector<int64_t>& tokens, int64_t vocab_size,
                              const std::string& where) {
  if (tokens.empty()) return fmt::format("found no token{}, allowed: at least one", where);
  const auto bad = std::find_if(tokens.begin(), tokens.end(),
                                [&](int64_t id) { return id < 0 || id >= vocab_size; });
  if (bad == tokens.end()) return "";
  return fmt::format("found the id {}{}, allowed: 0 to {} (model.vocab_size - 1)", *bad, where,
                     vocab_size - 1);
}

TokenLists generate_batch(const GPTModel& model, const TokenLists& prompts,
                          const GenerateOptions& options, const TokenListener& on_token,
                          const ParallelState& state) {
  check(prompts, options, model.config().vocab_size);
  TokenLists generated(prompts.size());
  if (prompts.empty() || options.max_tokens == 0) return generated;
  const at::NoGradGuard no_grad;
  const EvaluationMode evaluation(model);
  const CounterStream random(options.seed, "generate");
  const at::Tensor drawn = drawn_ids(options, model.config().vocab_size);
  Sequences sequences(model, prompts, options, state);
  std::vector<bool> ended(prompts.size(), false);
  while (std::find(ended.begin(), ended.end(), false) != ended.end()) {
    int64_t length = std::numeric_limits<int64_t>::max();
    for (size_t i = 0; i < prompts.size(); ++i)
      if (!ended[i]) length = std::min(length, sequences.length(i));
    const at::Tensor logits = sequences.logits_after(length);
    for (size_t i = 0; i < prompts.size(); ++i) {
      if (ended[i] || sequences.length(i) != length) continue;
      const at::Tensor own = logits[static_cast<int64_t>(i)].index_select(0, drawn);
      const size_t count = generated[i].size();
      require<UsageError>(!at::isnan(own).any().item<bool>(),
                          "generate: logits of token {}: found NaN, allowed: numbers", count);
      const double uniform = static_cast<double>(random.bits(count) >> 11) * 0x1p-53;
      const int64_t token = drawn[sample(own, options, uniform)].item<int64_t>();
      sequences.add(i, token);
      if (options.ends.contains(token)) {
        ended[i] = true;
        continue;
      }
      generated[i].push_back(token);
      const bool goes_on = !on_token || on_token(i, token);
      ended[i] = !goes_on || static_cast<int64_t>(generated[i].size()) == options.max_tokens;
    }
  }
  return generated;
}

std::vector<int64_t> generate(const GPTModel& model, const std::vector<int64_t>& prompt,
                              const GenerateOptions& options,
                              const std::function<void(int64_t)>& on_token) {
  const TokenListener listener = [&on_token](size_t, int64_t token) {
    if (on_token) on_token(token);
    return true;
  };
  return generate_batch(model, TokenLists{prompt}, options, listener).front();
}

}  // namespace lockstep
