#pragma once

// Internal: what one rank, or the one process, did in a run that is compared.

#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "lockstep/core/parameters.h"

namespace lockstep::testing {

/// One operator of forward that took parameters.
struct ParamUse {
  int64_t microbatch = 0;
  std::vector<std::string> params;  ///< in the order of the operator's arguments
  std::string operation;            ///< "aten::linear"
  std::vector<at::Tensor> inputs;   ///< the other floating-point arguments
  std::vector<at::Tensor> outputs;
  std::string random_before;  ///< an operator since the previous use that draws random numbers
};

using TensorsByName = std::map<std::string, at::Tensor>;

struct StepRecord {
  double loss = 0;  ///< sum over the micro-batches
  double norm = std::numeric_limits<double>::quiet_NaN();
  std::vector<ParamUse> uses;
  TensorsByName before;   ///< weights
  TensorsByName local;    ///< gradients as backward left them; not there: none
  TensorsByName reduced;  ///< final gradients; NaN where this rank does not hold them
  TensorsByName weights;  ///< after the update
};

struct RunRecord {
  std::vector<NamedParameter> params;
  TensorsByName own_initial;  ///< values that the module itself gave
  std::vector<StepRecord> steps;
  /// Why gradients of the last step are not final, the same on all ranks; empty: they are.
  std::string not_final;
};

}  // namespace lockstep::testing
