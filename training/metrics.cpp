#include "lockstep/training/metrics.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "lockstep/core/check.h"
#include "lockstep/core/input_file.h"
#include "lockstep/training/checkpoint/checkpoint_folder.h"
#include "lockstep/training/data/unfinished_file.h"

namespace lockstep {
namespace {

/// The whole lines of `text` whose iteration is at most `iteration`.
std::string lines_until(std::string_view text, int64_t iteration) {
  std::string kept;
  for (size_t end = text.find('\n'); end != text.npos; end = text.find('\n')) {
    const std::string_view line = text.substr(0, end + 1);
    text.remove_prefix(line.size());
    const auto json = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    const bool known =
        json.is_object() && json.contains("iteration") && json.at("iteration").is_number_integer();
    if (known && json.at("iteration").get<int64_t>() <= iteration) kept += line;
  }
  return kept;
}

}  // namespace

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
  if (kind_of_file(path_) != FileKind::none) {
    if (resumed > 0)
      keep_lines_until(resumed);
    else
      std::filesystem::rename(path_, folder + "/metrics.previous.jsonl", error);
  }
  require<FileError>(!error, "'{}' cannot be renamed: {}", path_, error.message());
  do file_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0666);
  while (file_ < 0 && errno == EINTR);
  if (file_ < 0) fail_to_write();
}

MetricsFile::~MetricsFile() { ::close(file_); }

void MetricsFile::keep_lines_until(int64_t iteration) const {
  InputFile file(path_);
  const std::string text = read_all(file);
  const std::string kept = lines_until(text, iteration);
  if (kept.size() == text.size()) return;
  const std::string partial =
      std::filesystem::path(path_).replace_filename("metrics.partial.jsonl");
  write_file(partial, {kept});
  std::error_code error;
  std::filesystem::rename(partial, path_, error);
  require<FileError>(!error, "'{}' cannot be written: {}", path_, error.message());
  sync_folder_of(path_);
}

void MetricsFile::write(const std::string& line) {
  const std::string whole = line + "\n";
  for (std::string_view left = whole; !left.empty();) {
    const ssize_t written = ::write(file_, left.data(), left.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail_to_write();
    left.remove_prefix(static_cast<size_t>(written));
  }
}

void MetricsFile::fail_to_write() const {
  fail<FileError>("'{}' cannot be written: {}", path_, std::strerror(errno));
}

}  // namespace lockstep
