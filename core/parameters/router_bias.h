#pragma once

#include <ATen/core/Tensor.h>

namespace lockstep {

/// The bias of one router of experts whose load is balanced without an auxiliary loss. An expert's
/// element rises by `rate` if the expert got fewer tokens than the mean, and falls by `rate` if it
/// got more. The tokens of all ranks of tp-dp-cp are counted.
struct RouterBias {
  at::Tensor bias;               ///< [experts], the same on all ranks; is updated
  at::Tensor tokens_per_expert;  ///< [experts], tokens that this rank has routed; is set to zero
  double rate = 1e-3;            ///< by which an element of `bias` changes
};

}  // namespace lockstep
