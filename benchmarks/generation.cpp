// Text generation with cached keys and values against a full forward for each token, in turn.
// Usage: generation [TOKENS = 1024] [ROUNDS = 3]

#include <cstdio>
#include <cstdlib>

#include "lockstep/benchmarks/interleaved.h"
#include "lockstep/core/config_io.h"
#include "lockstep/training/generate.h"

namespace lockstep::benchmarks {
namespace {

void run(int64_t tokens, int rounds) {
  TransformerConfig config = parse_config(
                                 "model { num_layers: 4 hidden_size: 128 num_attention_heads: 4 "
                                 "ffn_hidden_size: 384 vocab_size: 256 }",
                                 "generation")
                                 .model;
  config.seq_length = tokens + 1;
  const GPTModel model(config);
  GenerateOptions options{.max_tokens = tokens};
  Samples kept, read_again;
  bool same = true;
  for (int round = 0; round < rounds; ++round) {
    std::vector<int64_t> with_cache, without;
    options.use_cache = true;
    kept.push_back(seconds_of([&] { with_cache = generate(model, {1}, options); }));
    options.use_cache = false;
    read_again.push_back(seconds_of([&] { without = generate(model, {1}, options); }));
    same = same && with_cache == without;
  }
  const Estimate ratio = estimate({kept, read_again}, kept.size(),
                                  [](const auto& medians) { return medians[1] / medians[0]; });
  std::printf("%ld tokens: %.2f s kept, %.2f s read again, %.1f times (%.1f to %.1f), %s tokens\n",
              tokens, median(kept), median(read_again), ratio.value, ratio.low, ratio.high,
              same ? "the same" : "other");
}

}  // namespace
}  // namespace lockstep::benchmarks

int main(int argc, char** argv) {
  lockstep::benchmarks::run(argc > 1 ? std::atoll(argv[1]) : 1024,
                            argc > 2 ? std::atoi(argv[2]) : 3);
}
