#pragma once

#include <string>
#include <vector>

namespace lockstep {

/// An axis of a chart: maps values to 0 … 1 and places the tick marks. Needs no libtorch.
class Axis {
 public:
  struct Tick {
    double value;
    std::string label;  ///< "0.5", "20k", "1e-05"
  };

  /// The axis from `least` to `greatest`, which are finite; widened if they are equal. With
  /// `logarithmic` both must be > 0.
  Axis(double least, double greatest, bool logarithmic = false);

  /// The same axis, from the first to the last of about `ticks` tick marks.
  Axis rounded(int ticks) const;

  /// 0 at the least value, 1 at the greatest.
  double place(double value) const;

  /// At most about `count` tick marks inside the axis, at 1, 2 or 5 times a power of ten; on a long
  /// logarithmic axis at powers of ten.
  std::vector<Tick> ticks(int count) const;

  double least() const { return least_; }
  double greatest() const { return greatest_; }

 private:
  double least_, greatest_;
  bool logarithmic_;
};

/// "0", "12.5", "20k", "3.5M", "2G": a number with enough digits to distinguish it from one that is
/// `step` away.
std::string tick_label(double value, double step);

}  // namespace lockstep
