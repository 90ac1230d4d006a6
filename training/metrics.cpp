#include "lockstep/training/metrics.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "lockstep/checkpoint/checkpoint_folder.h"
#include "lockstep/core/check.h"
#include "lockstep/core/input_file.h"
#include "lockstep/core/uninterrupted.h"
#include "lockstep/datasets/crc32.h"
#include "lockstep/datasets/unfinished_file.h"

namespace lockstep {
namespace {

constexpr std::string_view kPrevious = "metrics.previous.", kEnding = "jsonl";

/// The iteration of a line; unset if it is not a line of metrics.
std::optional<int64_t> iteration_of_line(std::string_view line) {
  const auto json = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
  const bool known =
      json.is_object() && json.contains("iteration") && json.at("iteration").is_number_integer();
  return known ? std::optional(json.at("iteration").get<int64_t>()) : std::nullopt;
}

/// The whole lines of a file up to the iteration from which the run resumes.
struct KeptLines {
  std::string text;
  bool of_this_run = false;  ///< the line of that iteration is the run's own
  bool begins_here = false;  ///< the file begins with the next iteration
};

KeptLines lines_until(std::string_view text, const MetricsResume& resume) {
  KeptLines kept{.text = "", .of_this_run = !resume.checksum};
  std::optional<int64_t> first;
  for (size_t end = text.find('\n'); end != text.npos; end = text.find('\n')) {
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(end + 1);
    const auto iteration = iteration_of_line(line);
    if (!first) first = iteration;
    if (!iteration || *iteration > resume.iteration) continue;
    kept.text.append(line).append("\n");
    if (*iteration == resume.iteration && checksum_of_line(line) == resume.checksum)
      kept.of_this_run = true;
  }
  kept.begins_here = first == resume.iteration + 1;
  return kept;
}

/// 1 for "metrics.previous.jsonl", 3 for "metrics.previous.3.jsonl"; 0 for any other name.
int64_t number_of(std::string_view name) {
  if (!name.starts_with(kPrevious) || !name.ends_with(kEnding)) return 0;
  name.remove_prefix(kPrevious.size());
  if (name == kEnding) return 1;
  int64_t number = 0;
  const auto [rest, error] = std::from_chars(name.data(), name.data() + name.size(), number);
  return error == std::errc() && std::string_view(rest) == "." + std::string(kEnding) ? number : 0;
}

std::string name_of_previous(int64_t number) {
  return fmt::format("{}{}{}", kPrevious, number == 1 ? "" : fmt::format("{}.", number), kEnding);
}

/// Numbers of the files of other runs, the latest first.
std::vector<int64_t> previous_files(const std::string& folder) {
  std::vector<int64_t> numbers;
  for (const std::string& name : names_in_folder(folder))
    if (const int64_t number = number_of(name); number > 0) numbers.push_back(number);
  std::sort(numbers.rbegin(), numbers.rend());
  return numbers;
}

std::string read_metrics(const std::string& path) {
  InputFile file(path);
  return read_all(file);
}

std::string folder_of(const std::string& path) {
  return std::filesystem::path(path).parent_path().string();
}

using Json = nlohmann::ordered_json;

Json json_of(const StepTimes& times) {
  Json json;
  for (size_t i = 0; i < kStepParts; ++i) json[name_of(static_cast<StepPart>(i))] = times.ms[i];
  return json;
}

Json json_of(const std::vector<NamedNumber>& numbers) {
  Json json;
  for (const auto& [name, value] : numbers) json[name] = value;
  return json;
}

Json json_of(const SlowestRank& slowest) {
  return {{"rank", slowest.rank},
          {"ms", slowest.ms},
          {"in", name_of(slowest.part)},
          {"behind_ms", slowest.behind_ms},
          {"time_ms", json_of(slowest.times)},
          {"iterations", Json::array({slowest.first_iteration, slowest.last_iteration})}};
}

/// Adds the fields that not every line has.
void add_telemetry(Json& line, const IterationMetrics& metrics) {
  const auto add = [&](const char* name, const auto& value) {
    if (value) line[name] = *value;
  };
  if (metrics.times) line["time_ms"] = json_of(*metrics.times);
  add("model_tflops_per_device", metrics.model_tflops_per_device);
  add("utilisation", metrics.utilisation);
  add("memory_bytes", metrics.memory_bytes);
  add("peak_memory_bytes", metrics.peak_memory_bytes);
  if (!metrics.learning_rates.empty()) line["learning_rates"] = json_of(metrics.learning_rates);
  if (!metrics.grad_norms.empty()) line["grad_norms"] = json_of(metrics.grad_norms);
  if (metrics.slowest_rank) line["slowest_rank"] = json_of(*metrics.slowest_rank);
}

Json line_of(const IterationMetrics& metrics) {
  Json line = {{"iteration", metrics.iteration},
               {"lm_loss", metrics.lm_loss},
               {"grad_norm", metrics.grad_norm},
               {"learning_rate", metrics.learning_rate},
               {"consumed_samples", metrics.consumed_samples},
               {"num_tokens", metrics.num_tokens},
               {"iteration_ms", metrics.iteration_ms},
               {"tokens_per_second", metrics.tokens_per_second},
               {"skipped", metrics.skipped}};
  if (metrics.num_loss_tokens) line["num_loss_tokens"] = *metrics.num_loss_tokens;
  if (metrics.spike != Spike::none) line["spike"] = name_of(metrics.spike);
  if (metrics.num_zeros_in_grad) line["num_zeros_in_grad"] = *metrics.num_zeros_in_grad;
  if (metrics.loss_scale != 1) line["loss_scale"] = metrics.loss_scale;
  if (metrics.decoupled_learning_rate)
    line["decoupled_learning_rate"] = *metrics.decoupled_learning_rate;
  add_telemetry(line, metrics);
  return line;
}

Json line_of(const ValidationMetrics& metrics) {
  return {{"iteration", metrics.iteration},
          {"validation_loss", metrics.validation_loss},
          {"perplexity", metrics.perplexity}};
}

Json line_of(const TestMetrics& metrics) {
  return {{"iteration", metrics.iteration},
          {"test_loss", metrics.test_loss},
          {"test_perplexity", metrics.test_perplexity}};
}

/// The numbers of a line, "folder/lm_loss".
std::vector<Scalar> scalars_of(Json line, const char* folder) {
  line.erase("iteration");
  line.erase("slowest_rank");
  const Json flat = line.flatten();
  std::vector<Scalar> scalars;
  for (const auto& [path, value] : flat.items()) {
    if (value.is_number()) scalars.push_back({folder + path, value.get<double>()});
    if (value.is_boolean()) scalars.push_back({folder + path, value.get<bool>() ? 1.0 : 0.0});
  }
  return scalars;
}

}  // namespace

std::string to_json(const IterationMetrics& metrics) { return line_of(metrics).dump(); }

std::string to_json(const ValidationMetrics& metrics) { return line_of(metrics).dump(); }

std::string to_json(const TestMetrics& metrics) { return line_of(metrics).dump(); }

std::vector<Scalar> to_scalars(const IterationMetrics& metrics) {
  return scalars_of(line_of(metrics), "train");
}

std::vector<Scalar> to_scalars(const ValidationMetrics& metrics) {
  return scalars_of(line_of(metrics), "validation");
}

std::vector<Scalar> to_scalars(const TestMetrics& metrics) {
  return scalars_of(line_of(metrics), "test");
}

uint32_t checksum_of_line(std::string_view line) { return crc32(line); }

MetricsFile::MetricsFile(const std::string& folder, const MetricsResume& resume)
    : path_(folder + "/metrics.jsonl") {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  require<FileError>(!error,
                     "--output: folder '{}' cannot be "
                     "created: {}",
                     folder, error.message());
  if (resume.iteration > 0) {
    go_on(resume);
  } else if (const std::string aside = put_aside(); !aside.empty()) {
    note_ = fmt::format("the metrics of an earlier run are in '{}'", aside);
  }
  open();
}

MetricsFile::~MetricsFile() { ::close(file_); }

void MetricsFile::open() {
  constexpr int kFlags = O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW;
  file_ = uninterrupted([this] { return ::open(path_.c_str(), kFlags, 0666); });
  if (file_ < 0) fail_to_write();
  name_is_synced_ = false;
}

void MetricsFile::go_on(const MetricsResume& resume) {
  KeptLines kept;
  if (kind_of_file(path_) != FileKind::none) {
    const std::string text = read_metrics(path_);
    kept = lines_until(text, resume);
    if (kept.of_this_run && kept.text.size() != text.size()) replace_by(kept.text);
    if (kept.of_this_run) return;
  }
  if (!resume.checksum) return;
  const std::string folder = folder_of(path_);
  KeptLines found;
  for (const int64_t number : previous_files(folder)) {
    found = lines_until(read_metrics(folder + "/" + name_of_previous(number)), resume);
    if (found.of_this_run) break;
  }
  if (const std::string aside = put_aside(); !aside.empty()) {
    if (kept.begins_here)
      note_ = fmt::format("'{}' was from an earlier start at iteration {} and is now '{}'", path_,
                          resume.iteration, aside);
    else
      note_ = fmt::format("'{}' was from another run and is now '{}'", path_, aside);
    if (!kept.begins_here && !found.of_this_run)
      note_ += fmt::format("; the lines up to iteration {} are missing", resume.iteration);
  }
  if (found.of_this_run) replace_by(found.text);
}

std::string MetricsFile::put_aside() const {
  const FileKind kind = kind_of_file(path_);
  if (kind == FileKind::none || (kind == FileKind::regular && size_of_file(path_) == 0)) return "";
  const std::string folder = folder_of(path_);
  const auto numbers = previous_files(folder);
  std::string aside = folder + "/" + name_of_previous(numbers.empty() ? 1 : numbers.front() + 1);
  std::error_code error;
  std::filesystem::rename(path_, aside, error);
  require<FileError>(!error, "'{}' cannot be renamed to '{}': {}", path_, aside, error.message());
  return aside;
}

void MetricsFile::replace_by(const std::string& lines) const {
  const std::string partial =
      std::filesystem::path(path_).replace_filename("metrics.partial.jsonl");
  write_file(partial, {lines});
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

void MetricsFile::sync() {
  const bool good = uninterrupted([this] { return ::fdatasync(file_); }) == 0;
  if (!good && errno != EINVAL) fail_to_write();  // EINVAL: not a file that can be synchronized
  if (!name_is_synced_) sync_folder_of(path_);
  name_is_synced_ = true;
}

void MetricsFile::go_back(int64_t iteration) {
  const bool there = kind_of_file(path_) != FileKind::none;
  const std::string text = there ? read_metrics(path_) : "";
  const KeptLines kept = lines_until(text, {.iteration = iteration});
  if (kept.text.size() != text.size()) replace_by(kept.text);
  ::close(std::exchange(file_, -1));
  open();
}

void MetricsFile::fail_to_write() const {
  fail<FileError>("'{}' cannot be written: {}", path_, std::strerror(errno));
}

}  // namespace lockstep
