#pragma once

// Headers of libtorch that most sources need, compiled once for all targets. Sources include what
// they use all the same, so that LOCKSTEP_PRECOMPILE=OFF works.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/module.h>
