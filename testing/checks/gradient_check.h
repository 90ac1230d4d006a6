#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

namespace lockstep::testing {

struct GradientCheckOptions {
  double step = 1e-5;       ///< by which an element is moved, relative to 1 + its absolute value
  int64_t elements = 8;     ///< of each parameter: the one with the largest gradient, and others
  double tolerance = 1e-6;  ///< of a difference, relative to the parameter's largest gradient
};

/// One element whose gradient was compared.
struct CheckedElement {
  std::string parameter;
  int64_t element = 0;    ///< of the flattened parameter
  double autograd = 0;    ///< what backward left
  double difference = 0;  ///< what the central difference of the loss gives
  bool agrees = true;
};

struct GradientReport {
  std::vector<CheckedElement> elements;
  std::vector<std::string> without_gradient;  ///< trained parameters that backward did not reach
  bool ok() const;
};

/// "`scale`, element 3: autograd 0.5, difference 1": a line for each element that does not agree,
/// and one for each parameter without a gradient; empty if all agree.
std::string to_string(const GradientReport& report);

/// Compares what backward leaves in the parameters of `module` with central differences of the
/// loss, (f(w + h) - f(w - h)) / 2h, in fp64 in one process: for operations with a backward of your
/// own. `loss` gives one element and is called again for each difference; it must give the same
/// value for the same weights. Existing gradients are lost; weights stay as they are. UsageError: a
/// trained parameter that is not fp64, a loss of several elements, one that differs between two
/// calls.
///
/// The two may differ by options.tolerance, and by the rounding of the difference: 8 eps |f| / 2h.
/// Thus a gradient that is zero but for rounding, as that of a bias on the keys of attention, is
/// right. A sum of terms that cancel rounds by more than its value shows: take a mean of squares.
GradientReport check_gradients(torch::nn::Module& module, const std::function<at::Tensor()>& loss,
                               const GradientCheckOptions& options = {});

}  // namespace lockstep::testing
