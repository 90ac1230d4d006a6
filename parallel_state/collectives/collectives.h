#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "lockstep/parallel_state/process_group.h"
#include "lockstep/parallel_state/reduction.h"
#include "lockstep/parallel_state/work.h"

/// Collective communication. All ranks of the group must call every function, in the same order;
/// send() and receive() are called by the two ranks involved. The tensors of a call must be
/// contiguous, have one dtype, and live on the group's device or, for host data, on the CPU.
/// `label` says what is communicated ("bucket 3"); it must be the same on all ranks and appears in
/// every error.
///
/// Errors: UsageError for a tensor that does not fit the call. CommunicationError, naming group,
/// operation, label and rank, if a peer fails, the timeout expires, the ranks make different calls,
/// or c10d refuses the call; after that no group of the job can be used. In a group of one rank
/// nothing is sent and the returned work is complete.
///
/// On CUDA, NCCL does all of this. On the CPU, all pairs of ranks exchange tensors: over Gloo's
/// connections, or, if all ranks of the group are on one host and the system permits it, by reading
/// each other's memory. Gloo's own reduce-scatter costs one all-reduce per rank, its all-gather is
/// slow (see benchmarks/collectives.cpp), and with Gloo's collectives a mismatch between ranks ends
/// the process or gives wrong numbers. Sums add the ranks' terms in group order; bf16 and fp16 are
/// added in fp32 and rounded once at the end. The bits therefore do not depend on how a tensor is
/// split into messages, or on whether an all-reduce or a reduce-scatter computes the sum. A build
/// with LOCKSTEP_HOST_TRANSPORT=OFF uses Gloo's own collectives instead, with these dtypes and one
/// rounding, but without that order. There a mismatch between ranks is an error, except that
/// different sizes end the process.
namespace lockstep {

/// Combines `tensor` over the ranks, in place on every rank.
Work all_reduce(const ProcessGroup& group, const at::Tensor& tensor, const Reduction& reduction,
                std::string_view label);

/// Combines `input` [size * n elements] over the ranks; the rank at position i gets part i of the
/// result in `output` [n elements], which may be that part of `input`. Everything else in `input`
/// keeps its values, unless the reduction consumes it (see Reduction).
Work reduce_scatter(const ProcessGroup& group, const at::Tensor& output, const at::Tensor& input,
                    const Reduction& reduction, std::string_view label);

/// Gathers `input` [n elements] of all ranks into `output` [size * n elements], in group order.
/// `input` may be this rank's part of `output`.
Work all_gather(const ProcessGroup& group, const at::Tensor& output, const at::Tensor& input,
                std::string_view label);

/// Sends part i of `input` to the rank at position i, and receives that rank's part for this rank
/// as part i of `output`. `input` and `output` are split into equal parts along dimension 0.
Work all_to_all(const ProcessGroup& group, const at::Tensor& output, const at::Tensor& input,
                std::string_view label);

/// The same with uneven parts of input_rows[i] and output_rows[i] rows of dimension 0.
Work all_to_all(const ProcessGroup& group, const at::Tensor& output, const at::Tensor& input,
                const std::vector<int64_t>& output_rows, const std::vector<int64_t>& input_rows,
                std::string_view label);

/// Overwrites `tensor` with that of the rank at position `source` of the group. The source's wait()
/// may last until all others have it.
Work broadcast(const ProcessGroup& group, const at::Tensor& tensor, int64_t source,
               std::string_view label);

/// Several tensors in one call; all ranks must list them in the same order. With NCCL this is one
/// launch.
Work all_reduce(const ProcessGroup& group, const std::vector<at::Tensor>& tensors,
                const Reduction& reduction, std::string_view label);
Work reduce_scatter(const ProcessGroup& group, const std::vector<at::Tensor>& outputs,
                    const std::vector<at::Tensor>& inputs, const Reduction& reduction,
                    std::string_view label);
Work all_gather(const ProcessGroup& group, const std::vector<at::Tensor>& outputs,
                const std::vector<at::Tensor>& inputs, std::string_view label);
Work broadcast(const ProcessGroup& group, const std::vector<at::Tensor>& tensors, int64_t source,
               std::string_view label);

/// For messages on a device: connects these pairs of positions, each in both directions, in the
/// order of the list, which must be the same on all ranks of the group. Returns when this rank's
/// pairs are connected. Without this call the first message in each direction blocks the host until
/// the peer makes the matching call, and ranks that receive early can deadlock. The call costs
/// nothing for pairs that are already connected, or if tensors live on the CPU.
void connect_pairs(const ProcessGroup& group,
                   const std::vector<std::pair<int64_t, int64_t>>& pairs);

/// Sends `tensor` to the rank at position `destination`, which must receive it. Between two ranks
/// messages keep their order. A rank cannot send to itself.
Work send(const ProcessGroup& group, const at::Tensor& tensor, int64_t destination,
          std::string_view label);

/// Fills `tensor` with what the rank at position `source` sends.
Work receive(const ProcessGroup& group, const at::Tensor& tensor, int64_t source,
             std::string_view label);

/// A send and a receive at once: `sent` goes to the rank at position `destination`, and the rank at
/// position `source`, which may be the same rank, fills `received`, which must have the shape and
/// dtype of `sent`. All ranks of the group must call it, in the same order relative to the group's
/// collectives: with NCCL it is one launch on their stream. UsageError for tensors that overlap in
/// memory.
Work exchange(const ProcessGroup& group, const at::Tensor& sent, int64_t destination,
              const at::Tensor& received, int64_t source, std::string_view label);

/// The texts of all ranks, in group order. They may differ in length. Blocks.
std::vector<std::string> all_gather_texts(const ProcessGroup& group, const std::string& text,
                                          std::string_view label);

/// Returns when all ranks of the group have called it.
void barrier(const ProcessGroup& group, std::string_view label);

}  // namespace lockstep
