#include "lockstep/training/run_view.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "lockstep/training/quantity_text.h"

namespace lockstep {
namespace {

using Json = nlohmann::json;

constexpr int kLeastCurve = 4, kMostCurve = 24;
constexpr size_t kRecent = 50;  ///< iterations over which rates are averaged

struct TimePart {
  char letter;
  const char* name;
};
constexpr TimePart kTimeParts[] = {{'F', "forward"},   {'B', "backward"}, {'C', "communication"},
                                   {'O', "optimizer"}, {'D', "data"},     {'x', "other"}};

std::optional<double> number(const Json& line, const char* key) {
  const auto found = line.is_object() ? line.find(key) : line.end();
  if (!line.is_object() || found == line.end() || !found->is_number()) return {};
  return found->get<double>();
}

std::string mebibytes(double bytes) { return fmt::format("{:.0f} MiB", bytes / (1 << 20)); }

double recent_mean(const std::vector<MetricsPoint>& points) {
  const size_t count = std::min(points.size(), kRecent);
  double sum = 0;
  size_t counted = 0;
  for (size_t i = points.size() - count; i < points.size(); ++i)
    if (std::isfinite(points[i].value)) sum += points[i].value, ++counted;
  return counted == 0 ? 0 : sum / static_cast<double>(counted);
}

/// Tokens of the recent iterations divided by their time, in tokens per second; 0 if not known.
double recent_rate(const std::vector<MetricsPoint>& rates, const std::vector<MetricsPoint>& ms) {
  double tokens = 0, time = 0;
  auto rate = rates.rbegin();
  auto each = ms.rbegin();
  for (size_t count = 0; count < kRecent && rate != rates.rend() && each != ms.rend();) {
    if (rate->iteration != each->iteration) {
      if (rate->iteration > each->iteration)
        ++rate;
      else
        ++each;
      continue;
    }
    if (std::isfinite(rate->value) && std::isfinite(each->value)) {
      tokens += rate->value * each->value;
      time += each->value;
    }
    ++count, ++rate, ++each;
  }
  return time > 0 ? tokens / time : 0;
}

class View {
 public:
  View(const RunFacts& facts, const RunMetrics& metrics, const TerminalSize& size)
      : facts_(facts),
        metrics_(metrics),
        size_(size),
        last_(Json::parse(metrics.last_line, nullptr, /*allow_exceptions=*/false)),
        separator_(size.utf8 ? " · " : " | ") {}

  std::vector<std::string> lines() {
    add_progress();
    if (metrics_.last_iteration == 0) return cut();
    add_loss();
    const size_t curve_at = lines_.size();
    add_rates();
    add_time();
    add_memory();
    add_slowest_rank();
    add_age();
    add_curve(curve_at);
    return cut();
  }

 private:
  /// Adds lines with as many parts as fit; empty parts are left out.
  void add(const std::vector<std::string>& parts) {
    const auto columns = static_cast<size_t>(size_.columns);
    std::string line;
    for (const std::string& part : parts) {
      if (part.empty()) continue;
      if (!line.empty() && utf8_length(line + separator_ + part) > columns) {
        lines_.push_back(line);
        line.clear();
      }
      line += (line.empty() ? "" : separator_) + part;
    }
    if (!line.empty()) lines_.push_back(line);
  }

  std::string optional(const char* key, const char* format) const {
    const auto value = number(last_, key);
    return value ? fmt::format(fmt::runtime(format), *value) : "";
  }

  void add_progress() {
    const int64_t done = metrics_.last_iteration;
    if (done == 0) {
      add({facts_.name, facts_.layout, "no iteration yet"});
    } else if (const int64_t all = facts_.train_iters.value_or(0); all > 0) {
      const double share = std::min(static_cast<double>(done) / static_cast<double>(all), 1.0);
      add({facts_.name, facts_.layout,
           fmt::format("iteration {} of {}, {:.0f} %", done, all, std::floor(100 * share)),
           facts_.ended ? "ended" : ""});
      lines_.push_back("[" + terminal_shares({{'#', share}}, std::max(size_.columns - 2, 1)) + "]");
    } else {
      add({facts_.name, facts_.layout, fmt::format("iteration {}", done),
           facts_.ended ? "ended" : ""});
    }
  }

  void add_loss() {
    const Json validation = Json::parse(metrics_.last_validation, nullptr, false);
    const auto validated = number(validation, "validation_loss");
    const auto loss = number(last_, "lm_loss");
    add({loss ? fmt::format("loss {:.4f}", *loss) : "loss is not a number",
         validated ? fmt::format("validation {:.4f}", *validated) : "",
         optional("grad_norm", "grad norm {:.3f}"), optional("learning_rate", "lr {:.3e}"),
         last_.contains("skipped") && last_["skipped"] == true ? "SKIPPED" : ""});
  }

  void add_curve(size_t at) {
    const int room = size_.rows - static_cast<int>(lines_.size());
    if (room < kLeastCurve) return;
    std::vector<CurvePoint> points;
    for (const MetricsPoint& point : metrics_.of("lm_loss"))
      points.push_back({static_cast<double>(point.iteration), point.value});
    const auto curve =
        terminal_curve(points, size_.columns, std::min(room, kMostCurve), size_.utf8);
    lines_.insert(lines_.begin() + static_cast<ptrdiff_t>(at), curve.begin(), curve.end());
  }

  std::string time_left(double ms) const {
    if (!facts_.train_iters || facts_.ended || ms <= 0) return "";
    const auto left = static_cast<double>(*facts_.train_iters - metrics_.last_iteration);
    return format_duration(std::max(left, 0.0) * ms / 1000) + " left";
  }

  void add_rates() {
    const double ms = recent_mean(metrics_.of("iteration_ms"));
    const double rate = recent_rate(metrics_.of("tokens_per_second"), metrics_.of("iteration_ms"));
    const auto utilisation = number(last_, "utilisation");
    add({rate > 0 ? with_unit(rate) + " tokens/s" : "",
         ms > 0 ? fmt::format("{:.1f} ms an iteration", ms) : "", time_left(ms),
         optional("model_tflops_per_device", "{:.3g} TFLOP/s a device"),
         utilisation ? fmt::format("{:.1f} % of its peak", 100 * *utilisation) : ""});
  }

  void add_time() {
    const auto found = last_.find("time_ms");
    if (found == last_.end() || !found->is_object()) return;
    double sum = 0;
    for (const TimePart& part : kTimeParts) sum += number(*found, part.name).value_or(0);
    if (!(sum > 0)) return;
    std::vector<std::pair<char, double>> shares;
    std::vector<std::string> told;
    for (const TimePart& part : kTimeParts) {
      const auto ms = number(*found, part.name);
      if (!ms) continue;
      shares.emplace_back(part.letter, *ms / sum);
      told.push_back(fmt::format("{} {} {:.1f} ms", part.letter, part.name, *ms));
    }
    lines_.push_back("[" + terminal_shares(shares, std::max(size_.columns - 2, 1)) + "]");
    add(told);
  }

  void add_memory() {
    const auto now = number(last_, "memory_bytes"), peak = number(last_, "peak_memory_bytes");
    add({now ? "memory " + mebibytes(*now) : "", peak ? "at most " + mebibytes(*peak) : ""});
  }

  void add_slowest_rank() {
    const auto found = last_.find("slowest_rank");
    if (found == last_.end() || !found->is_object()) return;
    const auto rank = number(*found, "rank"), ms = number(*found, "ms"),
               behind = number(*found, "behind_ms");
    if (!rank) return;
    const auto in = found->find("in");
    add({fmt::format("slowest rank {:.0f}", *rank), ms ? fmt::format("{:.1f} ms", *ms) : "",
         in != found->end() && in->is_string() ? "in " + in->get<std::string>() : "",
         behind ? fmt::format("{:.1f} ms behind", *behind) : ""});
  }

  void add_age() {
    constexpr double kQuiet = 10;
    if (!facts_.ended && facts_.seconds_since_line >= kQuiet)
      add({"nothing new for " + format_duration(facts_.seconds_since_line)});
  }

  std::vector<std::string> cut() {
    if (static_cast<int>(lines_.size()) > size_.rows)
      lines_.resize(static_cast<size_t>(std::max(size_.rows, 1)));
    for (std::string& line : lines_) line = terminal_line(line, size_.columns, size_.utf8);
    return lines_;
  }

  const RunFacts& facts_;
  const RunMetrics& metrics_;
  const TerminalSize& size_;
  Json last_;
  std::string separator_;
  std::vector<std::string> lines_;
};

}  // namespace

std::vector<std::string> fields_of_run_view() {
  return {"lm_loss", "iteration_ms", "tokens_per_second"};
}

std::vector<std::string> run_view(const RunFacts& facts, const RunMetrics& metrics,
                                  const TerminalSize& size) {
  return View(facts, metrics, size).lines();
}

}  // namespace lockstep
