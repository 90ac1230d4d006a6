#pragma once

// Internal.

#include "lockstep/parallel_state/transport.h"

namespace lockstep {

/// For a planning rank's tensors without data: sends nothing, and keeps the tensors until wait(),
/// those of a message at most until the next one is sent, as a pipeline does.
class PlanningTransport : public Transport {
 public:
  class PlannedPart;

  void greet() override {}
  Parts all_reduce(const Tensors& tensors, const Reduction& reduction, uint64_t identity) override;
  Parts reduce_scatter(const Tensors& outputs, const Tensors& inputs, const Reduction& reduction,
                       uint64_t identity) override;
  Parts all_gather(const Tensors& outputs, const Tensors& inputs, uint64_t identity) override;
  Parts all_to_all(const at::Tensor& output, const at::Tensor& input,
                   const std::vector<int64_t>& output_rows, const std::vector<int64_t>& input_rows,
                   uint64_t identity) override;
  Parts broadcast(const Tensors& tensors, int source, uint64_t identity) override;
  Parts send(const at::Tensor& tensor, int destination, uint64_t identity) override;
  Parts receive(const at::Tensor& tensor, int source, uint64_t identity) override;
  Parts exchange(const at::Tensor& sent, int destination, const at::Tensor& received, int source,
                 uint64_t identity) override;

 private:
  std::weak_ptr<PlannedPart> sent_;  ///< the last message
};

}  // namespace lockstep
