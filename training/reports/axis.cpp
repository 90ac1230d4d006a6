#include "lockstep/training/axis.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace lockstep {
namespace {

/// The smallest of 1, 2 and 5 times a power of ten that cuts `range` into `count` parts or fewer.
double nice_step(double range, int count) {
  const double least = range / std::max(count, 1);
  const double power = std::pow(10, std::floor(std::log10(least)));
  for (const double factor : {1.0, 2.0, 5.0})
    if (factor * power >= least * (1 - 1e-9)) return factor * power;
  return 10 * power;
}

std::vector<Axis::Tick> linear_ticks(double least, double greatest, int count) {
  const double step = nice_step(greatest - least, count);
  const double slack = step * 1e-6;
  std::vector<Axis::Tick> ticks;
  for (double n = std::ceil((least - slack) / step); n * step <= greatest + slack; ++n) {
    const double value = n * step;
    ticks.push_back({value, tick_label(value, step)});
  }
  return ticks;
}

/// The ticks at `factors` times every `every`th power of ten.
std::vector<Axis::Tick> power_ticks(double least, double greatest,
                                    std::initializer_list<double> factors, int every) {
  std::vector<Axis::Tick> ticks;
  const auto first = static_cast<int>(std::floor(std::log10(least)));
  const auto last = static_cast<int>(std::ceil(std::log10(greatest)));
  for (int exponent = first; exponent <= last; ++exponent) {
    if (exponent % every != 0) continue;
    for (const double factor : factors) {
      const double value = factor * std::pow(10, exponent);
      if (value >= least * (1 - 1e-9) && value <= greatest * (1 + 1e-9))
        ticks.push_back({value, tick_label(value, value)});
    }
  }
  return ticks;
}

}  // namespace

Axis::Axis(double least, double greatest, bool logarithmic)
    : least_(least), greatest_(greatest), logarithmic_(logarithmic) {
  if (greatest_ - least_ > std::abs(greatest_) * 1e-12) return;
  const double margin = least == 0 ? 1 : std::abs(least) * 0.1;
  least_ -= margin;
  greatest_ += margin;
}

Axis Axis::rounded(int ticks) const {
  if (logarithmic_) return *this;
  const double step = nice_step(greatest_ - least_, ticks);
  return {std::floor(least_ / step + 1e-6) * step, std::ceil(greatest_ / step - 1e-6) * step};
}

double Axis::place(double value) const {
  if (!logarithmic_) return (value - least_) / (greatest_ - least_);
  return std::log(value / least_) / std::log(greatest_ / least_);
}

std::vector<Axis::Tick> Axis::ticks(int count) const {
  if (!logarithmic_) return linear_ticks(least_, greatest_, count);
  const int decades = static_cast<int>(std::ceil(std::log10(greatest_ / least_)));
  const int every = std::max(1, (decades + count - 1) / std::max(count, 1));
  std::vector<Tick> ticks = power_ticks(least_, greatest_, {1, 2, 5}, 1);
  if (static_cast<int>(ticks.size()) > count) ticks = power_ticks(least_, greatest_, {1}, every);
  return ticks.size() >= 3 ? ticks : linear_ticks(least_, greatest_, count);
}

std::string tick_label(double value, double step) {
  if (std::abs(value) < std::abs(step) * 1e-6) return "0";
  struct Unit {
    double size;
    const char* name;
  };
  const double largest = std::abs(value);
  Unit unit = {1, ""};
  for (const Unit& larger : {Unit{1e3, "k"}, Unit{1e6, "M"}, Unit{1e9, "G"}, Unit{1e12, "T"}})
    if (largest >= larger.size * (1 - 1e-9) && std::abs(step) >= larger.size / 100) unit = larger;
  if (largest / unit.size >= 1e7 || largest < 1e-4) return fmt::format("{:.3g}", value);
  const double digits = -std::floor(std::log10(std::abs(step) / unit.size) + 1e-9);
  return fmt::format("{:.{}f}{}", value / unit.size, std::clamp(static_cast<int>(digits), 0, 9),
                     unit.name);
}

}  // namespace lockstep
