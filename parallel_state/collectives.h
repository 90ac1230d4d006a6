#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>

#include "lockstep/parallel_state/process_group.h"

/// Collective communication. Every function must be called by all ranks of the group, in the same
/// order. Tensors must be contiguous and live on the group's device or, for host data, on the CPU.
/// `label` says what is communicated ("bucket 3") and appears in every error.
///
/// Errors: CommunicationError, naming group, operation, label and rank, when a peer fails, the
/// timeout passes or c10d refuses. In a group of one rank nothing is sent and the work is done.
namespace lockstep {

/// How the tensors of the ranks are combined.
enum class ReduceOp { sum, average, max, min };

/// "sum", "average", "max", "min"
const char* to_string(ReduceOp op);

/// A communication under way. Keeps its tensors alive. Must be waited for before its tensors are
/// read or written; a work that is dropped while under way is not cancelled.
class [[nodiscard]] Work {
 public:
  struct Operation;

  /// A work that is done.
  Work() = default;
  explicit Work(std::shared_ptr<Operation> operation) : operation_(std::move(operation)) {}

  /// CPU tensors: blocks until the operation has ended. CUDA tensors: makes the current stream
  /// wait for it. Throws CommunicationError if it failed. A second call does nothing.
  void wait();

  /// Whether wait() would return at once.
  bool is_completed() const;

 private:
  std::shared_ptr<Operation> operation_;
};

/// Combines `tensor` over the ranks, in place on every rank.
Work all_reduce(const ProcessGroup& group, const at::Tensor& tensor, ReduceOp op,
                std::string_view label);

/// Overwrites `tensor` with that of the rank at position `source` of the group.
Work broadcast(const ProcessGroup& group, const at::Tensor& tensor, int64_t source,
               std::string_view label);

/// Gathers `input` [n elements] of all ranks into `output` [size * n elements], in group order.
Work all_gather(const ProcessGroup& group, const at::Tensor& output, const at::Tensor& input,
                std::string_view label);

/// The texts of all ranks, in group order. They may differ in length. Blocks.
std::vector<std::string> all_gather_texts(const ProcessGroup& group, const std::string& text,
                                          std::string_view label);

/// Returns when all ranks of the group have called it.
void barrier(const ProcessGroup& group, std::string_view label);

}  // namespace lockstep
