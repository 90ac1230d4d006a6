#pragma once

#include <vector>

#include <torch/csrc/distributed/c10d/reducer.hpp>

#include "lockstep/parallel_state/process_group.h"

namespace lockstep::testing {

/// The options of c10d::Reducer that the tests vary.
struct C10dReducerOptions {
  bool find_unused_parameters = false;
  bool gradient_as_bucket_view = true;
};

/// PyTorch's own gradient reducer over `group`. `buckets` holds indices into `params`, in the order
/// in which the buckets are reduced. It is the oracle for our gradients and the competitor in our
/// benchmarks.
inline c10d::Reducer make_c10d_reducer(std::vector<at::Tensor> params,
                                       std::vector<std::vector<size_t>> buckets,
                                       c10::intrusive_ptr<c10d::ProcessGroup> group,
                                       const C10dReducerOptions& options = {}) {
  constexpr int64_t kNoCap = int64_t{1} << 60;
  const size_t count = params.size();
  return c10d::Reducer(std::move(params), std::move(buckets), std::move(group),
                       /*expect_sparse_gradients=*/std::vector<bool>(count, false),
                       /*bucket_bytes_cap=*/kNoCap, options.find_unused_parameters,
                       options.gradient_as_bucket_view,
                       /*param_names=*/{}, /*first_bucket_bytes_cap=*/kNoCap,
                       /*skip_all_reduce_unused_params=*/false, /*use_python_reducer=*/false,
                       /*bucket_bytes_cap_list=*/{});
}

/// The same over one of our groups, which must have more than one rank.
inline c10d::Reducer make_c10d_reducer(std::vector<at::Tensor> params,
                                       std::vector<std::vector<size_t>> buckets,
                                       const ProcessGroup& group,
                                       const C10dReducerOptions& options = {}) {
  return make_c10d_reducer(
      std::move(params), std::move(buckets),
      c10::intrusive_ptr<c10d::ProcessGroup>::unsafe_reclaim_from_nonowning(group.c10d_group()),
      options);
}

}  // namespace lockstep::testing
