#include "lockstep/training/sample_text.h"

#include <algorithm>

#include "lockstep/checkpoint/companion_files.h"
#include "lockstep/checkpoint/saved_model.h"
#include "lockstep/core/check.h"
#include "lockstep/parallel_state/parallel_axes.h"
#include "lockstep/training/generate.h"

namespace lockstep {

bool holds_whole_model(const Config& config) {
  const auto sizes = parallel_size_table();
  return std::all_of(sizes.begin(), sizes.end(),
                     [&](const ParallelSize* size) { return size->of(config.parallel) == 1; });
}

SampleText::SampleText(const Config& config)
    : config_(config.train),
      tokenizer_(make_tokenizer(config.data.tokenizer, "data.tokenizer")),
      prompt_(tokenizer_->encode(config_.sample_prompt)),
      ends_(ends_of_text(config, *tokenizer_)) {
  const std::string problem = problem_of_prompt(prompt_, config.model.vocab_size,
                                                " with data.tokenizer = " + config.data.tokenizer);
  require<ConfigError>(problem.empty(), "train.sample_prompt: {}", problem);
}

std::string SampleText::continued_by(const GPTModel& model) const {
  const GenerateOptions options{.max_tokens = config_.sample_tokens,
                                .vocabulary_size = tokenizer_->vocabulary_size(),
                                .ends = ends_};
  return config_.sample_prompt + tokenizer_->decode_more(generate(model, prompt_, options));
}

std::string SampleText::write(std::unique_ptr<Trainer> trainer, const std::string& checkpoint,
                              c10::Device device) const {
  const Config config = trainer->config();
  const bool whole = holds_whole_model(config);
  require<UsageError>(whole || !checkpoint.empty(),
                      "SampleText: found no checkpoint and a part of the model, allowed: one of "
                      "a checkpoint and the whole model");
  const Precision precision = config.train.precision;
  const bool as_loaded = precision == Precision::fp32 || precision == Precision::fp64;
  const bool capacity = config.model.moe_expert_capacity_factor.has_value();
  const bool fp8 = config.train.fp8 != Fp8Format::none;
  if (checkpoint.empty() || (whole && as_loaded && !capacity && !fp8))
    return continued_by(trainer->model());
  trainer.reset();
  return continued_by(*load_model(checkpoint, device).model);
}

}  // namespace lockstep
