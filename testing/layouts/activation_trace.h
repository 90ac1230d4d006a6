#pragma once

// Internal.

#include <memory>
#include <vector>

#include "lockstep/testing/step_record.h"

namespace lockstep::testing {

/// While such an object lives, records each operator on this thread that takes one of `params` or a
/// view of it, with copies of its arguments and results. Operators inside another one are not
/// recorded. What follows from parameters alone, such as a transposed copy, counts as those
/// parameters.
class ActivationTrace {
 public:
  ActivationTrace(const std::vector<NamedParameter>& params, int64_t microbatch,
                  std::vector<ParamUse>& uses);
  ~ActivationTrace();
  ActivationTrace(const ActivationTrace&) = delete;
  ActivationTrace& operator=(const ActivationTrace&) = delete;

  class Recorder;

 private:
  std::unique_ptr<Recorder> recorder_;
};

}  // namespace lockstep::testing
