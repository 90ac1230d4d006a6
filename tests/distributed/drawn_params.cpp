#include "lockstep/tests/distributed/drawn_params.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>

#include <ATen/ATen.h>

namespace lockstep::testing {
namespace {

constexpr std::array kRoleNames = {"same", "cut", "sum", "mean", "own"};
constexpr std::array kUsageNames = {"always", "in-the-last", "now-and-then"};
constexpr std::array kRouteNames = {"plain", "transposed", "expanded", "narrowed", "repeated"};

uint64_t mixed(uint64_t seed, uint64_t value) {  // splitmix64
  uint64_t z = seed * 0x9e3779b97f4a7c15 + value + 0x632be59bd9b4e019;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

uint64_t mixed_of(std::initializer_list<int64_t> values) {
  uint64_t result = 1;
  for (const int64_t value : values) result = mixed(result, static_cast<uint64_t>(value));
  return result;
}

/// A key for the coordinates on the axes whose role is in `roles`.
int64_t coordinates_on(const DrawnParam& param, const GridPlace& place,
                       std::initializer_list<AxisRole> roles) {
  int64_t key = 0;
  for (size_t axis = 0; axis < param.axes.size(); ++axis)
    if (std::find(roles.begin(), roles.end(), param.axes[axis].role) != roles.end())
      key = key * place.sizes[axis] + place.coordinates[axis];
  return key;
}

struct Extent {
  int64_t start, size;
};

/// The part at `place`: start and size in each dimension.
std::vector<Extent> extents(const DrawnParam& param, const GridPlace& place) {
  std::vector<Extent> result;
  for (const int64_t size : param.shape) result.push_back({0, size});
  for (size_t axis = 0; axis < param.axes.size(); ++axis) {
    if (param.axes[axis].role != AxisRole::cut) continue;
    Extent& extent = result[static_cast<size_t>(param.axes[axis].dim)];
    const int64_t chunk = (extent.size + place.sizes[axis] - 1) / place.sizes[axis];
    const int64_t start = std::min(extent.size, place.coordinates[axis] * chunk);
    extent = {extent.start + start, std::min(extent.size - start, chunk)};
  }
  return result;
}

/// A tensor for the part at `place`, filled with `value(index of the element in the whole)`.
template <class Value>
at::Tensor part_of(const DrawnParam& param, const GridPlace& place, Value value) {
  const std::vector<Extent> part = extents(param, place);
  at::Tensor result = at::empty(local_shape(param, place), at::kDouble);
  double* const data = result.data_ptr<double>();
  for (int64_t i = 0; i < result.numel(); ++i) {
    int64_t rest = i, index = 0, stride = 1;
    for (size_t dim = part.size(); dim-- > 0;) {
      index += (part[dim].start + rest % part[dim].size) * stride;
      rest /= part[dim].size;
      stride *= param.shape[dim];
    }
    data[i] = value(index);
  }
  return result;
}

constexpr std::initializer_list<AxisRole> kTermRoles = {AxisRole::sum, AxisRole::mean,
                                                        AxisRole::own};

/// The gradient of one use: integers from -2 to 2.
at::Tensor coefficients(const DrawnParam& param, const GridPlace& place, int64_t copy,
                        const Moment& moment) {
  const uint64_t seed = mixed_of({param.number, coordinates_on(param, place, kTermRoles), copy,
                                  moment.step, moment.microbatch});
  const bool one_number = param.route == Route::expanded;
  return part_of(param, place, [&](int64_t index) {
    const uint64_t random = mixed(seed, one_number ? 0 : static_cast<uint64_t>(index));
    return static_cast<double>(random % 5) - 2;
  });
}

int64_t times_used(const DrawnParam& param, const GridPlace& place, int64_t copy,
                   const Moment& moment) {
  const bool last = moment.microbatch + 1 == moment.microbatches;
  if (param.usage == Usage::always) return param.uses;
  const uint64_t random = mixed_of({param.number, coordinates_on(param, place, kTermRoles),
                                    coordinates_on(param, place, {AxisRole::cut}), copy,
                                    moment.step, moment.microbatch, 77});
  const auto times = static_cast<int64_t>(random % 3);
  return param.usage == Usage::in_the_last && last ? std::max<int64_t>(times, 1) : times;
}

at::Tensor loss_by_route(const at::Tensor& weight, const at::Tensor& gradient, Route route) {
  const at::Tensor factor = gradient.to(weight.scalar_type());
  if (weight.dim() == 0 && route != Route::expanded) return weight * factor;
  switch (route) {
    case Route::transposed:
      return (weight.transpose(0, -1) * factor.transpose(0, -1).contiguous()).sum();
    case Route::expanded:
      return weight.sum() * (factor.numel() == 0 ? at::zeros({}) : factor.flatten()[0]);
    case Route::narrowed:
      return (at::cat({at::zeros_like(factor), weight, at::zeros_like(factor)}, -1) *
              at::cat({factor, factor, factor}, -1))
          .sum();
    case Route::repeated:
      return (weight.unsqueeze(0).expand_as(at::stack({factor, factor})) *
              at::stack({factor - 1, at::ones_like(factor)}))
          .sum();
    default:
      return (weight * factor).sum();
  }
}

/// Sums `gradient(place)` over the axes, from `axis` on, whose ranks hold terms.
template <class Gradient>
void add_terms(const DrawnParam& param, GridPlace& place, size_t axis, at::Tensor& sum,
               const Gradient& gradient) {
  if (axis == param.axes.size()) {
    sum += gradient(place);
    return;
  }
  const AxisRole role = param.axes[axis].role;
  if (role != AxisRole::sum && role != AxisRole::mean)
    return add_terms(param, place, axis + 1, sum, gradient);
  const int64_t own = place.coordinates[axis];
  for (int64_t i = 0; i < place.sizes[axis]; ++i) {
    place.coordinates[axis] = i;
    add_terms(param, place, axis + 1, sum, gradient);
  }
  place.coordinates[axis] = own;
}

void visit_parts_from(const DrawnParam& param, GridPlace& place, size_t axis,
                      const std::function<void(const GridPlace&)>& visit) {
  if (axis == param.axes.size()) return visit(place);
  if (param.axes[axis].role != AxisRole::cut)
    return visit_parts_from(param, place, axis + 1, visit);
  for (int64_t i = 0; i < place.sizes[axis]; ++i) {
    place.coordinates[axis] = i;
    visit_parts_from(param, place, axis + 1, visit);
  }
}

}  // namespace

std::string DrawnParam::text() const {
  std::string result = fmt::format("{} {} {}", name(), shape, c10::toString(dtype));
  for (const AxisShare& axis : axes) {
    result += fmt::format(" {}", kRoleNames[static_cast<size_t>(axis.role)]);
    if (axis.role == AxisRole::cut) result += fmt::format("({})", axis.dim);
  }
  if (!trained) return result + " frozen";
  return result + fmt::format(" {} {} {}", kRouteNames[static_cast<size_t>(route)],
                              kUsageNames[static_cast<size_t>(usage)], uses);
}

DrawnParam draw_param(Draw& draw, int64_t number, const std::vector<Usage>& usages) {
  DrawnParam param;
  param.number = number;
  const int64_t dims = draw.of<int64_t>({0, 1, 1, 1, 2, 2, 2, 3});
  for (int64_t i = 0; i < dims; ++i)
    param.shape.push_back(draw.one_in(4) ? draw.between(1, 3)
                                         : draw.between(1, 40 / (dims * dims)));
  param.dtype =
      draw.of<at::ScalarType>({at::kDouble, at::kDouble, at::kDouble, at::kFloat, at::kBFloat16});
  param.route = draw.of<Route>(
      {Route::plain, Route::transposed, Route::expanded, Route::narrowed, Route::repeated});
  param.usage = draw.of(usages);
  param.uses = draw.between(1, 2);
  return param;
}

std::vector<int64_t> local_shape(const DrawnParam& param, const GridPlace& place) {
  std::vector<int64_t> shape;
  for (const Extent& extent : extents(param, place)) shape.push_back(extent.size);
  return shape;
}

at::Tensor initial_weight(const DrawnParam& param, const GridPlace& place) {
  return part_of(param, place, [&](int64_t index) {
    return static_cast<double>(mixed_of({param.number, index}) % 7) - 3;
  });
}

at::Tensor loss_of(const DrawnParam& param, const at::Tensor& weight, const GridPlace& place,
                   int64_t copy, const Moment& moment) {
  at::Tensor loss;
  const at::Tensor gradient = coefficients(param, place, copy, moment);
  for (int64_t use = times_used(param, place, copy, moment); use > 0; --use) {
    const at::Tensor term = loss_by_route(weight, gradient, param.route).to(at::kDouble);
    loss = loss.defined() ? loss + term : term;
  }
  return loss;
}

bool is_used(const DrawnParam& param, const GridPlace& place, int64_t copy, const Moment& moment) {
  return times_used(param, place, copy, moment) > 0;
}

at::Tensor local_gradient(const DrawnParam& param, const GridPlace& place, int64_t copy,
                          int64_t step, int64_t microbatches) {
  at::Tensor sum = at::zeros(local_shape(param, place), at::kDouble);
  for (int64_t m = 0; m < microbatches; ++m) {
    const Moment moment{step, m, microbatches};
    const int64_t times = times_used(param, place, copy, moment);
    if (times > 0) sum += coefficients(param, place, copy, moment) * times;
  }
  return sum;
}

at::Tensor reduced_gradient(const DrawnParam& param, const GridPlace& place, int64_t copy,
                            int64_t step, int64_t microbatches) {
  at::Tensor sum = at::zeros(local_shape(param, place), at::kDouble);
  GridPlace term = place;
  add_terms(param, term, 0, sum, [&](const GridPlace& other) {
    return local_gradient(param, other, copy, step, microbatches);
  });
  return sum / mean_ranks(param, place);
}

int64_t mean_ranks(const DrawnParam& param, const GridPlace& place) {
  int64_t ranks = 1;
  for (size_t axis = 0; axis < param.axes.size(); ++axis)
    if (param.axes[axis].role == AxisRole::mean) ranks *= place.sizes[axis];
  return ranks;
}

void visit_parts(const DrawnParam& param, const GridPlace& place,
                 const std::function<void(const GridPlace&)>& visit) {
  GridPlace part = place;
  visit_parts_from(param, part, 0, visit);
}

double gradient_tolerance(at::ScalarType dtype, int64_t divisor) {
  if (is_power_of_two(divisor)) return 0;
  return dtype == at::kDouble ? 1e-12 : 1e-4;
}

}  // namespace lockstep::testing
