#pragma once

#include <cstdlib>

namespace lockstep::testing {

/// A program whose tests include this multiplies with libtorch's default on every processor: for
/// what is compared with the test device's bits, or with plans, which know no temporary memory of
/// oneDNN.
[[maybe_unused]] inline const int kWithoutOneDnn =
    ::setenv("LOCKSTEP_ONEDNN", "0", /*overwrite=*/1);

}  // namespace lockstep::testing
