#include "lockstep/training/progress.h"

#include <fmt/format.h>

#include <cmath>

#include "lockstep/training/skipped_steps.h"

namespace lockstep {
namespace {

/// A NaN without its sign.
double shown(double value) { return std::isnan(value) ? std::abs(value) : value; }

std::string decoupled_rate(const IterationMetrics& metrics) {
  const auto& rate = metrics.decoupled_learning_rate;
  return rate ? fmt::format(" (embeddings {:.3e})", *rate) : "";
}

const char* told_of_skip(const IterationMetrics& metrics) {
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

std::string progress_line(const IterationMetrics& metrics, const ProgressStatus& status) {
  const std::string total = std::to_string(status.train_iters);
  return fmt::format(
      "iteration {:>{}}/{} | loss {:.4f} | grad norm {:.3f} | lr {:.3e}{} | {} tokens/s | {} MiB | "
      "{} left{}",
      metrics.iteration, total.size(), total, shown(metrics.lm_loss), shown(metrics.grad_norm),
      metrics.learning_rate, decoupled_rate(metrics), with_unit(metrics.tokens_per_second),
      status.memory_bytes >> 20, format_duration(status.seconds_left), told_of_skip(metrics));
}

ProgressDisplay::ProgressDisplay(std::ostream& out, bool terminal, int64_t train_iters,
                                 int64_t log_interval)
    : out_(out), terminal_(terminal), train_iters_(train_iters), log_interval_(log_interval) {}

void ProgressDisplay::iteration(const IterationMetrics& metrics, int64_t memory_bytes) {
  constexpr double kSmoothing = 0.05;
  ms_per_iteration_ = ms_per_iteration_ == 0 ? metrics.iteration_ms
                                             : (1 - kSmoothing) * ms_per_iteration_ +
                                                   kSmoothing * metrics.iteration_ms;
  const auto left = static_cast<double>(train_iters_ - metrics.iteration);
  const std::string line =
      progress_line(metrics, {train_iters_, memory_bytes, left * ms_per_iteration_ / 1000});
  if (terminal_ && !metrics.skipped) {
    out_ << "\r\x1b[K" << line << std::flush;
    line_open_ = true;
    return;
  }
  if (metrics.skipped || metrics.iteration == 1 || metrics.iteration % log_interval_ == 0 ||
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
