#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "lockstep/tests/distributed/random_cases.h"

/// Parameters that are drawn from a seed, and the oracle of their gradients: every term is a
/// formula of parameter, element, place and time with small integers as values, so that one process
/// can add up what all ranks contribute, in fp64 and without rounding, from the whole parameter and
/// from what is said of each axis. Nothing here asks the code that is tested.
namespace lockstep::testing {

/// What an axis of the ranks' grid is for a parameter.
enum class AxisRole {
  same,  ///< its ranks hold the same weight, and backward gives them the same gradient
  cut,   ///< they hold pieces of one dimension, as torch.chunk cuts it
  sum,   ///< they hold the same weight, and backward gives each a term of the gradient's sum
  mean,  ///< or of its mean
  own,   ///< each has its own gradient, which nobody reduces
};

struct AxisShare {
  AxisRole role = AxisRole::same;
  int64_t dim = 0;  ///< that is cut
};

/// How often a micro-batch uses a parameter: by place, time and parameter.
enum class Usage {
  always,        ///< DrawnParam::uses times
  in_the_last,   ///< the last of a step once at least, the others maybe not
  now_and_then,  ///< maybe not at all
};

/// The way from a weight to the loss, which decides in which memory format its gradient arrives.
enum class Route {
  plain,
  transposed,  ///< the gradient is a transposed view
  expanded,    ///< one number, expanded with strides of 0
  narrowed,    ///< a slice of a wider tensor
  repeated,    ///< the sum over an expanded dimension
};

/// Ranks on axes: sizes, and the coordinates of one of them.
struct GridPlace {
  std::vector<int64_t> sizes;
  std::vector<int64_t> coordinates;
};

/// When a backward is made.
struct Moment {
  int64_t step = 0;
  int64_t microbatch = 0;
  int64_t microbatches = 1;
};

struct DrawnParam {
  int64_t number = 0;  ///< tells parameters apart
  std::vector<int64_t> shape = {};
  at::ScalarType dtype = at::kDouble;
  bool trained = true;
  Route route = Route::plain;
  Usage usage = Usage::always;
  int64_t uses = 1;
  std::vector<AxisShare> axes = {};  ///< of its grid; they cut one after the other

  std::string name() const { return "p" + std::to_string(number); }
  /// "p3 [5, 2] Double cut(0) sum expanded now-and-then", for failures.
  std::string text() const;
};

/// Shape (none to three dimensions, mostly of sizes that nothing divides), dtype, route and usage.
/// `usages`: those allowed.
DrawnParam draw_param(Draw& draw, int64_t number, const std::vector<Usage>& usages);

/// The shape of the part at `place`, which may be empty.
std::vector<int64_t> local_shape(const DrawnParam& param, const GridPlace& place);

/// The first values of the part at `place` (fp64), the same for parameters of one number and shape.
at::Tensor initial_weight(const DrawnParam& param, const GridPlace& place);

/// What the rank at `place` adds to its loss. `copy` tells copies of a tied parameter apart.
/// Undefined where it does not use the parameter.
at::Tensor loss_of(const DrawnParam& param, const at::Tensor& weight, const GridPlace& place,
                   int64_t copy, const Moment& moment);

/// Whether the rank at `place` uses the parameter.
bool is_used(const DrawnParam& param, const GridPlace& place, int64_t copy, const Moment& moment);

/// The gradient that all micro-batches of a step leave in the part at `place` (fp64), before
/// anything is reduced.
at::Tensor local_gradient(const DrawnParam& param, const GridPlace& place, int64_t copy,
                          int64_t step, int64_t microbatches);

/// The same reduced over the axes of role sum and mean.
at::Tensor reduced_gradient(const DrawnParam& param, const GridPlace& place, int64_t copy,
                            int64_t step, int64_t microbatches);

/// Number of ranks over which the parameter is a mean.
int64_t mean_ranks(const DrawnParam& param, const GridPlace& place);

/// Calls `visit` with the place of every part of the parameter, one for each combination of
/// coordinates on the axes that cut it, the others being those of `place`.
void visit_parts(const DrawnParam& param, const GridPlace& place,
                 const std::function<void(const GridPlace&)>& visit);

/// Whether a division by `divisor` is exact.
inline bool is_power_of_two(int64_t divisor) { return (divisor & (divisor - 1)) == 0; }

/// By how much a gradient of this dtype may be wrong that was divided by `divisor`: small integers
/// and powers of two have no rounding at all.
double gradient_tolerance(at::ScalarType dtype, int64_t divisor);

}  // namespace lockstep::testing
