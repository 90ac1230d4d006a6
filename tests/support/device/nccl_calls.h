#pragma once

#include "lockstep/tests/support/device/nccl_launches.h"

/// The collectives of c10d as calls of NCCL: checks of the arguments, and the tasks of the kernel.
/// Errors are ValueError and TypeError and name the collective.
namespace lockstep::testing {

using Tensors = std::vector<at::Tensor>;

/// The calling rank.
struct NcclCaller {
  c10::Device device;
  int rank, size;
};

/// Refuses tensors that are not dense, contiguous and on the caller's device, and dtypes that NCCL
/// lacks.
void check_nccl_tensors(const NcclCaller& caller, const Tensors& tensors, const std::string& kind);
/// Checks the rank of a peer or root: allowed are 0 to size - 1.
int check_nccl_rank(const NcclCaller& caller, int64_t rank, const std::string& kind);

NcclCall all_reduce_call(const NcclCaller& caller, const Tensors& tensors,
                         const c10d::ReduceOp& op);
NcclCall reduce_call(const NcclCaller& caller, const at::Tensor& output, const at::Tensor& input,
                     const c10d::ReduceOp& op, int64_t root);
NcclCall broadcast_call(const NcclCaller& caller, const at::Tensor& output, const at::Tensor& input,
                        int64_t root);
NcclCall all_gather_call(const NcclCaller& caller, const Tensors& outputs, const Tensors& inputs);
/// Gathers into one tensor and copies from it to `outputs`, which all have one size.
NcclCall all_gather_list_call(const NcclCaller& caller, const Tensors& outputs,
                              const at::Tensor& input);
NcclCall reduce_scatter_call(const NcclCaller& caller, const Tensors& outputs,
                             const Tensors& inputs, const c10d::ReduceOp& op);
/// Copies `inputs`, which all have one size, into one tensor and scatters from it.
NcclCall reduce_scatter_list_call(const NcclCaller& caller, const at::Tensor& output,
                                  const Tensors& inputs, const c10d::ReduceOp& op);
/// `output_rows`, `input_rows`: rows of dimension 0 for each rank; empty: equal parts. Messages of
/// zero bytes are not sent.
NcclCall all_to_all_call(const NcclCaller& caller, const at::Tensor& output,
                         const at::Tensor& input, const std::vector<int64_t>& output_rows,
                         const std::vector<int64_t>& input_rows);
NcclCall all_to_all_list_call(const NcclCaller& caller, const Tensors& outputs,
                              const Tensors& inputs);
/// `outputs`: one for each rank on the root, none elsewhere.
NcclCall gather_call(const NcclCaller& caller, const Tensors& outputs, const at::Tensor& input,
                     int64_t root);
/// `inputs`: one for each rank on the root, none elsewhere.
NcclCall scatter_call(const NcclCaller& caller, const at::Tensor& output, const Tensors& inputs,
                      int64_t root);
NcclCall barrier_call(const NcclCaller& caller);

}  // namespace lockstep::testing
