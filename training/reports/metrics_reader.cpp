#include "lockstep/training/metrics_reader.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>

#include "lockstep/core/check.h"
#include "lockstep/core/input_file.h"

namespace lockstep {
namespace {

constexpr size_t kPiece = size_t{4} << 20;
constexpr double kNotANumber = std::numeric_limits<double>::quiet_NaN();

std::optional<double> number_in(const nlohmann::json& value) {
  if (value.is_null()) return kNotANumber;
  if (value.is_boolean()) return value.get<bool>() ? 1 : 0;
  return value.is_number() ? std::optional(value.get<double>()) : std::nullopt;
}

/// The value of "time_ms.forward"; null if there is none. A key that itself contains dots comes
/// first.
const nlohmann::json* find_field(const nlohmann::json& object, std::string_view field) {
  if (!object.is_object()) return nullptr;
  if (const auto found = object.find(field); found != object.end()) return &*found;
  for (size_t dot = field.find('.'); dot != field.npos; dot = field.find('.', dot + 1))
    if (const auto part = object.find(field.substr(0, dot)); part != object.end())
      if (const nlohmann::json* const inner = find_field(*part, field.substr(dot + 1)))
        return inner;
  return nullptr;
}

double number_of(const nlohmann::json& line, std::string_view field) {
  const nlohmann::json* const found = find_field(line, field);
  const double value = found ? number_in(*found).value_or(0) : 0;
  return std::isnan(value) ? 0 : value;
}

/// Unset if `line` is not a line of metrics.
std::optional<nlohmann::json> parse_line(std::string_view line) {
  nlohmann::json json = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
  const auto iteration = json.is_object() ? json.find("iteration") : json.end();
  if (!json.is_object() || iteration == json.end() || !iteration->is_number_integer()) return {};
  return json;
}

void list_numbers(const nlohmann::ordered_json& object, const std::string& prefix,
                  std::vector<std::string>& names) {
  for (const auto& [key, value] : object.items()) {
    if (value.is_object())
      list_numbers(value, prefix + key + ".", names);
    else if (value.is_number() || value.is_null() || value.is_boolean())
      names.push_back(prefix + key);
  }
}

}  // namespace

const std::vector<MetricsPoint>& RunMetrics::of(std::string_view field) const {
  static const std::vector<MetricsPoint> none;
  const auto found = series.find(field);
  return found == series.end() ? none : found->second;
}

MetricsReader::MetricsReader(std::string path, std::vector<std::string> fields)
    : path_(std::move(path)), fields_(std::move(fields)) {}

bool MetricsReader::was_replaced(const InputFile& file) const {
  if (file.size() < position_) return true;
  std::string found(last_whole_.size(), '\0');
  file.read_at(position_ - static_cast<int64_t>(found.size()), found.data(), found.size());
  return found != last_whole_;
}

bool MetricsReader::read_more() {
  const InputFile file(path_);
  const bool replaced = was_replaced(file);
  if (replaced) {
    metrics_ = {};
    steps_.clear();
    position_ = 0;
    last_whole_.clear();
    torn_.clear();
  }
  const int64_t begin = position_;
  int64_t at = position_ + static_cast<int64_t>(torn_.size());
  std::string piece;
  while (at < file.size()) {
    piece.resize(static_cast<size_t>(std::min<int64_t>(file.size() - at, kPiece)));
    file.read_at(at, piece.data(), piece.size());
    at += static_cast<int64_t>(piece.size());
    std::string_view left = piece;
    for (size_t end = left.find('\n'); end != left.npos; end = left.find('\n')) {
      torn_.append(left.substr(0, end + 1));
      left.remove_prefix(end + 1);
      take(std::string_view(torn_).substr(0, torn_.size() - 1));
      position_ += static_cast<int64_t>(torn_.size());
      last_whole_.swap(torn_);
      torn_.clear();
    }
    torn_.append(left);
  }
  return replaced || position_ != begin;
}

void MetricsReader::drop_from(int64_t iteration) {
  while (!steps_.empty() && steps_.back().iteration >= iteration) steps_.pop_back();
  for (auto& [name, points] : metrics_.series)
    while (!points.empty() && points.back().iteration >= iteration) points.pop_back();
}

void MetricsReader::take(std::string_view line) {
  const std::optional<nlohmann::json> json = parse_line(line);
  if (!json) {
    ++metrics_.lines_without_metrics;
    return;
  }
  const auto iteration = json->at("iteration").get<int64_t>();
  const bool of_step = json->contains("lm_loss");
  if (!of_step && json->contains("validation_loss")) {
    metrics_.last_validation = line;
  } else if (of_step || !json->contains("test_loss")) {
    if (!steps_.empty() && steps_.back().iteration >= iteration) drop_from(iteration);
    const Step before = steps_.empty() ? Step{0, 0, 0} : steps_.back();
    steps_.push_back({iteration, before.tokens + number_of(*json, "num_tokens"),
                      before.seconds + number_of(*json, "iteration_ms") / 1000});
    metrics_.iterations = static_cast<int64_t>(steps_.size());
    metrics_.last_iteration = iteration;
    metrics_.last_line = line;
  }
  const Step where = steps_.empty() ? Step{iteration, 0, 0} : steps_.back();
  for (const std::string& field : fields_) {
    const nlohmann::json* const found = find_field(*json, field);
    const auto value = found ? number_in(*found) : std::nullopt;
    if (!value) continue;
    auto& points = metrics_.series[field];
    while (!points.empty() && points.back().iteration >= iteration) points.pop_back();
    points.push_back({iteration, where.tokens, where.seconds, *value});
  }
}

RunMetrics read_run_metrics(const std::string& run, const std::vector<std::string>& fields) {
  MetricsReader reader(metrics_path(run), fields);
  reader.read_more();
  return reader.metrics();
}

std::string metrics_path(const std::string& run) {
  const bool folder = kind_of_file(run) == FileKind::folder;
  return folder ? run + (run.ends_with('/') ? "" : "/") + "metrics.jsonl" : run;
}

std::vector<std::string> numeric_fields(std::string_view line) {
  const auto json = nlohmann::ordered_json::parse(line, nullptr, /*allow_exceptions=*/false);
  std::vector<std::string> names;
  if (json.is_object() && json.contains("iteration")) list_numbers(json, "", names);
  return names;
}

}  // namespace lockstep
