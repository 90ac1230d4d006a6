#include "lockstep/training/sample_text.h"

#include <algorithm>

#include "lockstep/checkpoint/saved_model.h"
#include "lockstep/core/check.h"
#include "lockstep/datasets/tokenizer.h"
#include "lockstep/parallel_state/parallel_axes.h"
#include "lockstep/training/generate.h"

namespace lockstep {

bool holds_whole_model(const Config& config) {
  const auto sizes = parallel_size_table();
  return std::all_of(sizes.begin(), sizes.end(),
                     [&](const ParallelSize* size) { return size->of(config.parallel) == 1; });
}

std::string sample_text(std::unique_ptr<Trainer> trainer, const std::string& checkpoint,
                        c10::Device device) {
  const Config config = trainer->config();
  const bool whole = holds_whole_model(config);
  require<UsageError>(whole || !checkpoint.empty(),
                      "sample_text: found no checkpoint and a part of the model, allowed: one of "
                      "a checkpoint and the whole model");
  const auto tokenizer = make_tokenizer(config.data.tokenizer, "data.tokenizer");
  const auto prompt = tokenizer->encode(config.train.sample_prompt);
  const GenerateOptions options{.max_tokens = config.train.sample_tokens,
                                .vocabulary_size = tokenizer->vocabulary_size()};
  const auto text_of = [&](const GPTModel& model) {
    return config.train.sample_prompt + tokenizer->decode_more(generate(model, prompt, options));
  };
  const Precision precision = config.train.precision;
  const bool as_loaded = precision == Precision::fp32 || precision == Precision::fp64;
  const bool capacity = config.model.moe_expert_capacity_factor.has_value();
  if (checkpoint.empty() || (whole && as_loaded && !capacity)) return text_of(trainer->model());
  trainer.reset();
  return text_of(*load_model(checkpoint, device).model);
}

}  // namespace lockstep
