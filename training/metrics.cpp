#include "lockstep/training/metrics.h"

#include <filesystem>
#include <nlohmann/json.hpp>

#include "lockstep/core/check.h"

namespace lockstep {

std::string to_json(const IterationMetrics& metrics) {
  nlohmann::ordered_json line = {{"iteration", metrics.iteration},
                                 {"lm_loss", metrics.lm_loss},
                                 {"grad_norm", metrics.grad_norm},
                                 {"learning_rate", metrics.learning_rate},
                                 {"consumed_samples", metrics.consumed_samples},
                                 {"num_tokens", metrics.num_tokens},
                                 {"iteration_ms", metrics.iteration_ms},
                                 {"tokens_per_second", metrics.tokens_per_second},
                                 {"skipped", metrics.skipped}};
  if (metrics.num_zeros_in_grad) line["num_zeros_in_grad"] = *metrics.num_zeros_in_grad;
  if (metrics.loss_scale != 1) line["loss_scale"] = metrics.loss_scale;
  return line.dump();
}

std::string to_json(const ValidationMetrics& metrics) {
  const nlohmann::ordered_json line = {{"iteration", metrics.iteration},
                                       {"validation_loss", metrics.validation_loss},
                                       {"perplexity", metrics.perplexity}};
  return line.dump();
}

MetricsFile::MetricsFile(const std::string& folder) : path_(folder + "/metrics.jsonl") {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  require<FileError>(!error, "--output: folder '{}' cannot be made: {}", folder, error.message());
  if (std::filesystem::exists(path_))
    std::filesystem::rename(path_, folder + "/metrics.previous.jsonl", error);
  file_.open(path_);
  require<FileError>(file_.good() && !error, "'{}' cannot be written", path_);
}

void MetricsFile::write(const std::string& line) {
  file_ << line + "\n" << std::flush;
  require<FileError>(file_.good(), "'{}' cannot be written; is the disk full?", path_);
}

}  // namespace lockstep
