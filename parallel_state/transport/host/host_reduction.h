#pragma once

// Internal.

#include <optional>

#include "lockstep/parallel_state/host_transfers.h"
#include "lockstep/parallel_state/ordered_reduction.h"

namespace lockstep {

/// The type that tensors of `dtype` are reduced in; nothing if they cannot be reduced, see
/// reducible_on_cpu().
std::optional<HostType> host_type(at::ScalarType dtype);

/// How a tensor is cut: rank p owns the elements begin(p) ... end(p).
struct HostSlices {
  at::Tensor input;  ///< of all slices; if `gather`, also where the sums are gathered
  at::Tensor output;
  HostType type;
  bool gather = false;
  int64_t length;  ///< elements of a slice
  int64_t numel;
  int64_t item;  ///< bytes of an element

  HostSlices(const at::Tensor& whole, int64_t slice_length);

  int64_t begin(int rank) const { return std::min(rank * length, numel); }
  int64_t end(int rank) const { return begin(rank + 1); }
  int64_t numel_of(int rank) const { return end(rank) - begin(rank); }
  std::byte* at(int64_t element) const { return bytes_of(input) + element * item; }
};

/// Gives each of the other ranks its slice, by messages or, if the ranks read memory,
/// for them to read; adds the terms of the slice of `rank` in rank order, chunk by chunk; and gives
/// the sums to all ranks if `slices` gathers. Call finish() on the transfers afterwards.
void reduce_slices(HostTransfers& transfers, const HostSlices& slices,
                   const HostReduction& reduction, int rank, int size);

}  // namespace lockstep
