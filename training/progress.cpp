#include "lockstep/training/progress.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "lockstep/training/skipped_steps.h"

namespace lockstep {
namespace {

/// A NaN without its sign.
double shown(double value) { return std::isnan(value) ? std::abs(value) : value; }

std::string decoupled_rate(const IterationMetrics& metrics) {
  const auto& rate = metrics.decoupled_learning_rate;
  return rate ? fmt::format(" (embeddings {:.3e})", *rate) : "";
}

const char* skip_text(const IterationMetrics& metrics) {
  if (!metrics.skipped) return "";
  switch (reason_of_skip(metrics)) {
    case SkipReason::not_finite:
      return " | SKIPPED: the gradient is not finite";
    case SkipReason::norm_above_threshold:
      return " | SKIPPED: the gradient norm is above optimizer.grad_norm_skip_threshold";
    case SkipReason::spike:
      break;
  }
  return metrics.spike == Spike::loss ? " | SKIPPED: the loss is a spike"
                                      : " | SKIPPED: the gradient norm is a spike";
}

}  // namespace

std::string progress_line(const IterationMetrics& metrics, const ProgressStatus& status,
                          size_t columns) {
  const std::string total = std::to_string(status.train_iters);
  std::vector<std::string> parts = {
      fmt::format("iteration {:>{}}/{}", metrics.iteration, total.size(), total),
      fmt::format("loss {:.4f}", shown(metrics.lm_loss)),
      fmt::format("grad norm {:.3f}", shown(metrics.grad_norm)),
      fmt::format("lr {:.3e}{}", metrics.learning_rate, decoupled_rate(metrics)),
      with_unit(metrics.tokens_per_second) + " tokens/s",
      fmt::format("{} MiB", status.memory_bytes >> 20),
      format_duration(status.seconds_left) + " left" + skip_text(metrics)};
  const auto line = [&] { return fmt::format("{}", fmt::join(parts, " | ")); };
  for (const ptrdiff_t dispensable : {5, 3, 2, 2})  // places after the removals before
    if (line().size() > columns) parts.erase(parts.begin() + dispensable);
  return line().substr(0, columns);
}

ProgressDisplay::ProgressDisplay(std::ostream& out, std::function<int()> columns,
                                 int64_t train_iters, int64_t log_interval)
    : out_(out),
      columns_(std::move(columns)),
      train_iters_(train_iters),
      log_interval_(log_interval) {}

void ProgressDisplay::note_time(double ms) {
  constexpr double kSmoothing = 0.05;
  if (++seen_ == 2) weight_ = 0;
  weight_ = (1 - kSmoothing) * weight_ + kSmoothing;
  ms_per_iteration_ += kSmoothing / weight_ * (ms - ms_per_iteration_);
}

void ProgressDisplay::iteration(const IterationMetrics& metrics, int64_t memory_bytes) {
  note_time(metrics.iteration_ms);
  const auto left = static_cast<double>(train_iters_ - metrics.iteration);
  const ProgressStatus status = {train_iters_, memory_bytes, left * ms_per_iteration_ / 1000};
  if (columns_ && !metrics.skipped) {
    const auto room = static_cast<size_t>(std::max(columns_() - 1, 1));
    out_ << "\r\x1b[K" << progress_line(metrics, status, room) << std::flush;
    line_open_ = true;
    return;
  }
  const std::string line = progress_line(metrics, status);
  if (metrics.skipped || seen_ == 1 || metrics.iteration % log_interval_ == 0 ||
      metrics.iteration == train_iters_)
    message(line);
}

void ProgressDisplay::validation(const ValidationMetrics& metrics) {
  message(fmt::format("iteration {} | validation loss {:.4f} | perplexity {:.3f}",
                      metrics.iteration, shown(metrics.validation_loss),
                      shown(metrics.perplexity)));
}

void ProgressDisplay::test(const TestMetrics& metrics) {
  message(fmt::format("iteration {} | test loss {:.4f} | perplexity {:.3f}", metrics.iteration,
                      shown(metrics.test_loss), shown(metrics.test_perplexity)));
}

void ProgressDisplay::message(const std::string& text) {
  if (line_open_) out_ << "\n";
  line_open_ = false;
  out_ << text << std::endl;
}

}  // namespace lockstep
