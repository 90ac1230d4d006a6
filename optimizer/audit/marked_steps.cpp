#include "lockstep/optimizer/marked_steps.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/core/text_digest.h"
#include "lockstep/distributed/gradient_scaling.h"
#include "lockstep/optimizer/expected_audit.h"
#include "lockstep/parallel_state/collectives.h"

namespace lockstep {
namespace {

/// The factor between the markers of two ranks that share a round.
constexpr double kSlot = 1 << 14;
/// How far a marker may be from an integer: rounding to 16 bits and, in the slots of a round, the
/// slots below.
constexpr double kRounding = 0.3;

/// A number that tells parameters apart; copies of one have the same. 16 bits have no room for it.
double number_of(const MarkedGradient& gradient) {
  if (gradient.bytes < 4) return 1;
  const auto& tie = gradient.param->description.tie;
  return static_cast<double>(1 + 2 * (text_digest(tie ? tie->name : gradient.param->name) % 6));
}

/// The fewest bytes of all gradients on all ranks.
int64_t fewest_bytes(const MarkedLoop& loop) {
  int64_t fewest = 8;
  for (const MarkedGradient& gradient : loop.gradients) fewest = std::min(fewest, gradient.bytes);
  const at::Tensor all =
      at::full({}, fewest, at::TensorOptions(loop.state.device()).dtype(at::kLong));
  all_reduce(loop.state.world(), all, ReduceOp::min, "audit").wait();
  return all.item<int64_t>();
}

/// The number that all elements of a gradient on this rank have; notes a problem if they differ.
std::optional<double> held_number(const MarkedGradient& gradient, MarkerReading& reading) {
  if (!reading.problem.empty()) return {};
  const at::Tensor held = gradient.held();
  if (!held.defined()) {
    reading.problem = "no gradient after the step";
    return {};
  }
  if (held.numel() == 0) return {};
  const at::Tensor all = held.detach().to(at::kDouble);
  const double least = all.min().item<double>(), most = all.max().item<double>();
  const double rounding = gradient.bytes == 8 ? 1e-9 : gradient.bytes == 4 ? 1e-6 : 1e-2;
  if (std::isfinite(most) && most - least <= rounding * std::abs(most)) return most;
  reading.problem =
      fmt::format("different terms in its elements: markers from {:g} to {:g}", least, most);
  return {};
}

/// The sum of the terms of a gradient whose markers are 1.
double sum_of(const MarkerReading& reading) {
  double sum = 0;
  for (const AuditTerms& terms : reading.terms)
    sum += static_cast<double>(terms.numerator) / static_cast<double>(terms.denominator) *
           static_cast<double>(terms.ranks.size());
  return sum;
}

class Measurement {
 public:
  explicit Measurement(const MarkedLoop& loop)
      : loop_(loop),
        parts_(kMarkerResolution * loop.averaged_ranks),
        readings_(loop.gradients.size()) {
    const int64_t bytes = fewest_bytes(loop);
    slots_ = bytes == 8                               ? (loop.averaged_ranks == 1 ? 4 : 3)
             : bytes == 4 && loop.averaged_ranks == 1 ? 2
                                                      : 1;
    token_ranks_ = bytes == 8 ? 40 : bytes == 4 ? 16 : 4;
    if (bytes >= 4) fewest_tokens_ = std::pow(2.0, 32);
  }

  std::vector<MarkerReading> run() {
    for (int64_t first = 0; first < loop_.state.world_size(); first += slots_) measure_terms(first);
    if (!loop_.divides_by_tokens) return readings_;
    for (int64_t first = 0; first < loop_.state.world_size(); first += token_ranks_)
      measure_tokens(first);
    return readings_;
  }

 private:
  /// Without tokens, so that nothing is divided by their number.
  void measure_terms(int64_t first) {
    const int64_t slot = loop_.state.rank() - first;
    const double own = slot < 0 || slot >= slots_ ? 0
                                                  : static_cast<double>(parts_) *
                                                        std::pow(kSlot, static_cast<double>(slot));
    loop_.step([&](size_t i) { return number_of(loop_.gradients[i]) * own; }, /*tokens=*/0);
    for (size_t i = 0; i < readings_.size(); ++i) {
      if (const auto found = held_number(loop_.gradients[i], readings_[i]))
        read_terms(i, first, *found);
      if (!readings_[i].problem.empty()) readings_[i].terms.clear();
    }
  }

  /// Reads from the slot of the highest rank down.
  void read_terms(size_t number, int64_t first, double rest) {
    MarkerReading& reading = readings_[number];
    for (int64_t slot = slots_ - 1; slot >= 0; --slot) {
      const double unit =
          number_of(loop_.gradients[number]) * std::pow(kSlot, static_cast<double>(slot));
      const double parts = std::round(rest / unit);
      if (std::abs(rest / unit - parts) > kRounding) {
        reading.problem =
            fmt::format("the term of rank {} is no multiple of 1/{} of its gradient: {:g} times it",
                        first + slot, parts_, rest / unit / static_cast<double>(parts_));
        return;
      }
      rest -= parts * unit;
      if (parts == 0) continue;
      const ScalingFactor factor = lowest_terms(static_cast<int64_t>(parts), parts_);
      reading.terms.push_back({factor.numerator, factor.denominator, {first + slot}});
    }
  }

  /// The number of each rank's tokens is a power of two of its own, beyond 32 bits if fp16 need not
  /// hold the quotient.
  void measure_tokens(int64_t first) {
    const int64_t own = loop_.state.rank() - first;
    const bool takes_part = own >= 0 && own < token_ranks_;
    loop_.step([](size_t) { return static_cast<double>(kMarkerResolution); },
               takes_part ? fewest_tokens_ * std::pow(2.0, static_cast<double>(own)) : 0);
    for (size_t i = 0; i < readings_.size(); ++i) {
      if (const auto found = held_number(loop_.gradients[i], readings_[i]))
        read_tokens(readings_[i], first, *found);
      if (!readings_[i].problem.empty()) readings_[i].token_ranks.clear();
    }
  }

  void read_tokens(MarkerReading& reading, int64_t first, double found) const {
    const double undivided = static_cast<double>(kMarkerResolution) * sum_of(reading);
    const double divisor = undivided / found / fewest_tokens_;
    const double sum = std::round(divisor);
    if (undivided == 0 || !(std::abs(divisor - sum) < kRounding)) {
      reading.problem =
          fmt::format("the divisor is no sum of the ranks' tokens: a marker of {:g} became {:g}",
                      undivided, found);
      return;
    }
    for (int64_t i = 0; i < token_ranks_; ++i)
      if ((static_cast<int64_t>(sum) >> i) & 1) reading.token_ranks.push_back(first + i);
  }

  const MarkedLoop& loop_;
  int64_t parts_;             ///< of a gradient
  int64_t slots_ = 1;         ///< ranks whose markers share a round
  int64_t token_ranks_ = 1;   ///< ranks whose tokens share a round
  double fewest_tokens_ = 8;  ///< more than one, so that none counts as 0
  std::vector<MarkerReading> readings_;
};

}  // namespace

std::vector<MarkerReading> read_markers(const MarkedLoop& loop) { return Measurement(loop).run(); }

void check_readings(const MarkedLoop& loop, std::vector<MarkerReading>& readings, const char* how) {
  const auto marker = static_cast<double>(kMarkerResolution * loop.averaged_ranks);
  loop.step([&](size_t) { return marker; }, /*tokens=*/0);
  for (size_t i = 0; i < readings.size(); ++i) {
    const auto found = held_number(loop.gradients[i], readings[i]);
    const double expected = marker * sum_of(readings[i]);
    const double rounding = loop.gradients[i].bytes < 4 ? 1e-2 * std::abs(expected) : kRounding;
    if (!found || std::abs(*found - expected) <= rounding) continue;
    readings[i].problem =
        fmt::format("{}: a sum of markers of {:g} in place of {:g}", how, *found, expected);
    readings[i].terms.clear();
  }
}

void fill_held(const MarkedLoop& loop, double value) {
  const at::NoGradGuard no_grad;
  for (const MarkedGradient& gradient : loop.gradients)
    if (const at::Tensor held = gradient.held(); held.defined()) held.fill_(value);
}

int64_t elements_in_norm(const MarkedLoop& loop, const std::function<at::Tensor()>& norm) {
  fill_held(loop, 1);
  const auto found = norm().item<double>();
  return std::llround(found * found);
}

}  // namespace lockstep
