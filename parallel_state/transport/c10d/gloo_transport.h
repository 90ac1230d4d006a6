#pragma once

// Internal.

#include "lockstep/parallel_state/c10d_transport.h"

namespace lockstep {

/// Plain Gloo's collectives of CPU tensors, plus what Gloo lacks. bf16 and fp16 are added in fp32,
/// which is faster in Gloo, and int16 in int32: see dtype_of_sums(). Averages are sums that wait()
/// divides. A reduce-scatter, which would cost Gloo one all-reduce per rank, is an all-to-all whose
/// terms wait() combines in rank order. Everything else travels as bytes, whatever the dtype.
///
/// Gloo determines the order in which an all-reduce adds. Gloo does not distinguish calls, so every
/// call also gathers its identity, 8 bytes per rank, and wait() fails if the ranks made different
/// calls. That is too late for messages of different sizes, at which Gloo ends the process.
class GlooTransport : public C10dTransport {
 public:
  GlooTransport(c10::intrusive_ptr<c10d::ProcessGroup> group, std::chrono::milliseconds timeout)
      : C10dTransport(std::move(group), c10::kCPU), timeout_(timeout) {}

  void greet() override;
  Parts all_reduce(const Tensors& tensors, const Reduction& reduction, uint64_t identity) override;
  Parts reduce_scatter(const Tensors& outputs, const Tensors& inputs, const Reduction& reduction,
                       uint64_t identity) override;
  Parts all_gather(const Tensors& outputs, const Tensors& inputs, uint64_t identity) override;
  Parts all_to_all(const at::Tensor& output, const at::Tensor& input,
                   const std::vector<int64_t>& output_rows, const std::vector<int64_t>& input_rows,
                   uint64_t identity) override;
  Parts broadcast(const Tensors& tensors, int source, uint64_t identity) override;

 private:
  /// The comparison of the call's identity, in progress.
  Parts agree(uint64_t identity) const;
  /// start_one(i) -> a part. Leaves out empty tensors, which are empty on all ranks.
  template <class StartOne>
  Parts start_each(const Tensors& tensors, uint64_t identity, StartOne start_one) const;

  std::chrono::milliseconds timeout_;
};

/// The dtype in which terms of `dtype` are added.
at::ScalarType dtype_of_sums(at::ScalarType dtype);

}  // namespace lockstep
