#include "lockstep/testing/gradient_check.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/core/parameters.h"

namespace lockstep::testing {
namespace {

double value_of(const std::function<at::Tensor()>& loss) {
  const at::NoGradGuard no_grad;
  return loss().item<double>();
}

/// The element with the largest gradient, and others at equal distances.
std::set<int64_t> chosen_elements(const at::Tensor& grad, int64_t count) {
  const int64_t numel = grad.numel();
  std::set<int64_t> chosen = {grad.abs().argmax().item<int64_t>()};
  for (int64_t i = 0; i < std::min(count, numel); ++i)
    chosen.insert(i * numel / std::min(count, numel));
  return chosen;
}

struct Difference {
  double value = 0;
  double rounding = 0;  ///< of `value`, from that of the two losses
};

Difference central_difference(double& weight, double relative_step,
                              const std::function<at::Tensor()>& loss) {
  struct Restored {
    double& weight;
    double value = weight;
    ~Restored() { weight = value; }
  } const restored{weight};
  const double before = weight;
  const double step = relative_step * (1 + std::abs(before));
  weight = before + step;
  const double above = weight, upper = value_of(loss);
  weight = before - step;
  const double below = weight, lower = value_of(loss);
  constexpr double kLossRounding = 8 * std::numeric_limits<double>::epsilon();
  return {.value = (upper - lower) / (above - below),
          .rounding = kLossRounding * std::max(std::abs(upper), std::abs(lower)) / (above - below)};
}

void check_parameter(const NamedParameter& param, const std::function<at::Tensor()>& loss,
                     const GradientCheckOptions& options, GradientReport& report) {
  const at::Tensor grad = param.tensor.grad().contiguous().flatten();
  if (grad.numel() == 0) return;
  const double most = grad.abs().max().item<double>();
  at::Tensor weights = param.tensor.detach();
  require<UsageError>(weights.is_contiguous(), "check_gradients: parameter '{}' is not contiguous",
                      param.name);
  auto* const data = weights.mutable_data_ptr<double>();
  for (const int64_t element : chosen_elements(grad, options.elements)) {
    CheckedElement checked = {.parameter = param.name, .element = element};
    checked.autograd = grad[element].item<double>();
    const Difference difference = central_difference(data[element], options.step, loss);
    checked.difference = difference.value;
    const double scale = std::max({most, std::abs(checked.difference), 1e-6});
    checked.agrees = std::abs(checked.autograd - checked.difference) <=
                     options.tolerance * scale + difference.rounding;
    report.elements.push_back(checked);
  }
}

}  // namespace

bool GradientReport::ok() const {
  return without_gradient.empty() &&
         std::all_of(elements.begin(), elements.end(),
                     [](const CheckedElement& element) { return element.agrees; });
}

std::string to_string(const GradientReport& report) {
  std::string text;
  for (const std::string& name : report.without_gradient)
    text += fmt::format("`{}`: no gradient; the loss does not depend on it\n", name);
  for (const CheckedElement& element : report.elements)
    if (!element.agrees)
      text += fmt::format("`{}`, element {}: autograd {:.9g}, difference {:.9g}\n",
                          element.parameter, element.element, element.autograd, element.difference);
  return text;
}

GradientReport check_gradients(torch::nn::Module& module, const std::function<at::Tensor()>& loss,
                               const GradientCheckOptions& options) {
  std::vector<NamedParameter> params = collect_parameters(module);
  std::erase_if(params, [](const NamedParameter& param) { return !param.tensor.requires_grad(); });
  for (const NamedParameter& param : params) {
    require<UsageError>(param.tensor.scalar_type() == at::kDouble && param.tensor.is_cpu(),
                        "check_gradients: parameter '{}' is {} on {}, allowed: Double on cpu",
                        param.name, at::toString(param.tensor.scalar_type()),
                        param.tensor.device().str());
    at::Tensor(param.tensor).mutable_grad().reset();
  }
  const at::Tensor value = loss();
  require<UsageError>(value.defined() && value.numel() == 1,
                      "check_gradients: the loss must have one element");
  const double again = value_of(loss);
  require<UsageError>(value.item<double>() == again,
                      "check_gradients: found a loss of {} and then of {} for the same weights",
                      value.item<double>(), again);
  value.backward();
  GradientReport report;
  for (const NamedParameter& param : params)
    if (param.tensor.grad().defined())
      check_parameter(param, loss, options, report);
    else
      report.without_gradient.push_back(param.name);
  return report;
}

}  // namespace lockstep::testing
