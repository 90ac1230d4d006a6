#pragma once

// Internal.

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "lockstep/parallel_state/pending.h"
#include "lockstep/parallel_state/reduction.h"

namespace lockstep {

/// How the tensors of a group's ranks travel. The ranks make the same calls in the same order, and
/// arguments have been checked: tensors are contiguous and, within a call, of one dtype and device,
/// sizes fit, and the group has several ranks. Every function starts its operation on all tensors
/// and returns the parts in progress, which keep the tensors' memory alive. `identity` is that of
/// the call, the same on all ranks; kUncounted for a call outside the sequence that the ranks agree
/// on.
class Transport {
 public:
  using Tensors = std::vector<at::Tensor>;
  using Parts = std::vector<std::shared_ptr<Pending>>;
  using Pairs = std::vector<std::pair<int, int>>;
  static constexpr uint64_t kUncounted = 0;

  virtual ~Transport() = default;

  /// Pending::abandon() of all.
  static void abandon(const Parts& parts);

  /// Returns when all members have connected: if a member ended earlier, that would look like a
  /// failure to members that are still connecting. Must be the first call on every rank.
  virtual void greet() = 0;
  /// For use before messages between these pairs of positions, if the first message would block the
  /// host until the peer makes the matching call: connects each pair in both directions, in the
  /// order of the list, which must be the same on all members. Pairs without this rank, or already
  /// connected, cost nothing; nor does any pair on the CPU.
  virtual void connect(const Pairs& /*pairs*/) {}
  /// Bytes that this rank has read from the memory of the others; nothing if everything is sent.
  virtual std::optional<int64_t> bytes_read() const { return std::nullopt; }

  /// In place. On the CPU the dtype must be one that reducible_on_cpu() allows.
  virtual Parts all_reduce(const Tensors& tensors, const Reduction& reduction,
                           uint64_t identity) = 0;
  /// inputs[i] [size * n elements] -> outputs[i] [n elements], which may be this rank's part of it.
  virtual Parts reduce_scatter(const Tensors& outputs, const Tensors& inputs,
                               const Reduction& reduction, uint64_t identity) = 0;
  /// inputs[i] [n elements], which may be this rank's part of outputs[i] [size * n elements].
  virtual Parts all_gather(const Tensors& outputs, const Tensors& inputs, uint64_t identity) = 0;
  /// Part i of `input` has input_rows[i] rows of dimension 0 and goes to rank i.
  virtual Parts all_to_all(const at::Tensor& output, const at::Tensor& input,
                           const std::vector<int64_t>& output_rows,
                           const std::vector<int64_t>& input_rows, uint64_t identity) = 0;
  virtual Parts broadcast(const Tensors& tensors, int source, uint64_t identity) = 0;
  /// Messages between two ranks keep their order.
  virtual Parts send(const at::Tensor& tensor, int destination, uint64_t identity) = 0;
  virtual Parts receive(const at::Tensor& tensor, int source, uint64_t identity) = 0;
  /// Both at once, with the same shape and dtype; on a device one launch, in order with the
  /// collectives.
  virtual Parts exchange(const at::Tensor& sent, int destination, const at::Tensor& received,
                         int source, uint64_t identity);
};

/// Whether CPU tensors of `dtype` can be reduced, whichever transport does it.
bool reducible_on_cpu(at::ScalarType dtype);
inline constexpr char kReducibleTypes[] =
    "Float, Double, BFloat16, Half, Char, Short, Int, Long, Byte";

/// Multiplies by the factor of `reduction` in place, rounded as Reduction says.
void scale_terms(at::Tensor terms, const Reduction& reduction);

/// Bytes of a row of dimension 0.
int64_t bytes_of_row(const at::Tensor& tensor);
/// The same for that many rows each.
std::vector<int64_t> bytes_of_rows(const at::Tensor& tensor, const std::vector<int64_t>& rows);

}  // namespace lockstep
