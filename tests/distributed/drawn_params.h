#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "lockstep/tests/distributed/random_cases.h"

/// Parameters drawn from a seed, and the oracle of their gradients. Each term is a formula of
/// parameter, element, place and time, with small integers as values. One process can therefore add
/// up all ranks' terms, in fp64 and without rounding, from the whole parameter and the roles of the
/// axes. Nothing here uses the code under test.
namespace lockstep::testing {

/// The role of an axis of the ranks' grid for a parameter.
enum class AxisRole {
  same,  ///< ranks hold the same weight; backward gives all of them the same gradient
  cut,   ///< ranks hold pieces of one dimension, as torch.chunk cuts it
  sum,   ///< ranks hold the same weight; backward gives each a term of the gradient's sum
  mean,  ///< the same for its mean
  own,   ///< each rank has its own gradient, which is not reduced
};

struct AxisShare {
  AxisRole role = AxisRole::same;
  int64_t dim = 0;  ///< the dimension that is cut
};

/// How often a micro-batch uses a parameter; depends on place, time and parameter.
enum class Usage {
  always,        ///< DrawnParam::uses times
  in_the_last,   ///< at least once in a step's last micro-batch; elsewhere maybe not
  now_and_then,  ///< maybe not at all
};

/// The path from a weight to the loss. It decides the memory format in which the gradient arrives.
enum class Route {
  plain,
  transposed,  ///< the gradient is a transposed view
  expanded,    ///< one number, expanded with strides of 0
  narrowed,    ///< a slice of a wider tensor
  repeated,    ///< the sum over an expanded dimension
};

/// A grid's sizes, and the coordinates of one rank.
struct GridPlace {
  std::vector<int64_t> sizes;
  std::vector<int64_t> coordinates;
};

/// The time of a backward.
struct Moment {
  int64_t step = 0;
  int64_t microbatch = 0;
  int64_t microbatches = 1;
};

struct DrawnParam {
  int64_t number = 0;  ///< distinguishes parameters
  std::vector<int64_t> shape = {};
  at::ScalarType dtype = at::kDouble;
  bool trained = true;
  Route route = Route::plain;
  Usage usage = Usage::always;
  int64_t uses = 1;
  std::vector<AxisShare> axes = {};  ///< of its grid; they cut one after another

  std::string name() const { return "p" + std::to_string(number); }
  /// "p3 [5, 2] Double cut(0) sum expanded now-and-then", for failures.
  std::string text() const;
};

/// Draws shape (zero to three dimensions, mostly of sizes without divisors), dtype, route and
/// usage. `usages`: the allowed ones.
DrawnParam draw_param(Draw& draw, int64_t number, const std::vector<Usage>& usages);

/// The shape of the part at `place`, which may be empty.
std::vector<int64_t> local_shape(const DrawnParam& param, const GridPlace& place);

/// The initial values of the part at `place` (fp64), equal for parameters with equal number and
/// shape.
at::Tensor initial_weight(const DrawnParam& param, const GridPlace& place);

/// The term that the rank at `place` adds to its loss. `copy` distinguishes copies of a tied
/// parameter. Undefined if the rank does not use the parameter.
at::Tensor loss_of(const DrawnParam& param, const at::Tensor& weight, const GridPlace& place,
                   int64_t copy, const Moment& moment);

/// Whether the rank at `place` uses the parameter.
bool is_used(const DrawnParam& param, const GridPlace& place, int64_t copy, const Moment& moment);

/// The gradient that all micro-batches of a step leave in the part at `place` (fp64), before any
/// reduction.
at::Tensor local_gradient(const DrawnParam& param, const GridPlace& place, int64_t copy,
                          int64_t step, int64_t microbatches);

/// The same, reduced over the axes with role sum or mean.
at::Tensor reduced_gradient(const DrawnParam& param, const GridPlace& place, int64_t copy,
                            int64_t step, int64_t microbatches);

/// Number of ranks over which the gradient is a mean.
int64_t mean_ranks(const DrawnParam& param, const GridPlace& place);

/// Calls `visit` with the place of every part of the parameter: all coordinates on the axes that
/// cut it, with the other coordinates from `place`.
void visit_parts(const DrawnParam& param, const GridPlace& place,
                 const std::function<void(const GridPlace&)>& visit);

/// Whether a division by `divisor` is exact.
inline bool is_power_of_two(int64_t divisor) { return (divisor & (divisor - 1)) == 0; }

/// The permitted error of a gradient of this dtype that was divided by `divisor`. Small integers
/// divided by powers of two need no rounding.
double gradient_tolerance(at::ScalarType dtype, int64_t divisor);

}  // namespace lockstep::testing
