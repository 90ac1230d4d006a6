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
  if (metrics.decoupled_learning_rate)
    line["decoupled_learning_rate"] = *metrics.decoupled_learning_rate;
  return line.dump();
}

std::string to_json(const ValidationMetrics& metrics) {
  const nlohmann::ordered_json line = {{"iteration", metrics.iteration},
                                       {"validation_loss", metrics.validation_loss},
                                       {"perplexity", metrics.perplexity}};
  return line.dump();
}

MetricsFile::MetricsFile(const std::string& folder, int64_t resumed)
    : path_(folder + "/metrics.jsonl") {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  require<FileError>(!error, "--output: folder '{}' cannot be made: {}", folder, error.message());
  if (std::filesystem::exists(path_)) {
    if (resumed > 0)
      keep_lines_until(resumed);
    else
      std::filesystem::rename(path_, folder + "/metrics.previous.jsonl", error);
  }
  file_.open(path_, std::ios::app);
  require<FileError>(file_.good() && !error, "'{}' cannot be written", path_);
}

void MetricsFile::keep_lines_until(int64_t iteration) const {
  std::ifstream file(path_);
  std::string kept;
  for (std::string line; std::getline(file, line) && !file.eof();) {
    const auto json = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    const bool known =
        json.is_object() && json.contains("iteration") && json.at("iteration").is_number_integer();
    if (known && json.at("iteration").get<int64_t>() <= iteration) kept += line + "\n";
  }
  file.close();
  const std::string partial = path_ + ".partial";
  std::error_code error;
  std::ofstream out(partial, std::ios::trunc);
  out << kept << std::flush;
  const bool good = out.good();
  out.close();
  if (good) std::filesystem::rename(partial, path_, error);
  require<FileError>(good && !error, "'{}' cannot be written; is the disk full?", partial);
}

void MetricsFile::write(const std::string& line) {
  file_ << line + "\n" << std::flush;
  require<FileError>(file_.good(), "'{}' cannot be written; is the disk full?", path_);
}

}  // namespace lockstep
