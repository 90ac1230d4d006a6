#pragma once

#include <cstdlib>

namespace lockstep::testing {

/// A program whose tests include this uses libtorch's default matrix product on every processor. It
/// is for tests that compare with the test device's bits, or with plans, which do not include
/// oneDNN's temporary memory.
[[maybe_unused]] inline const int kWithoutOneDnn =
    ::setenv("LOCKSTEP_ONEDNN", "0", /*overwrite=*/1);

}  // namespace lockstep::testing
