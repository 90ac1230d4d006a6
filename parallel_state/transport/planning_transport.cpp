#include "lockstep/parallel_state/planning_transport.h"

#include <ATen/ATen.h>

namespace lockstep {

/// Never complete before it is waited for, because nobody may rely on more.
class PlanningTransport::PlannedPart : public Pending {
 public:
  explicit PlannedPart(Tensors tensors) : tensors_(std::move(tensors)) {}
  void release() { tensors_.clear(); }
  void wait(const Waiting& /*waiting*/) override { release(); }
  bool is_completed() const override { return false; }

 private:
  Tensors tensors_;
};

namespace {

using PlannedPart = PlanningTransport::PlannedPart;

Transport::Parts planned(Transport::Tensors tensors, const Transport::Tensors& more = {}) {
  tensors.insert(tensors.end(), more.begin(), more.end());
  return {std::make_shared<PlannedPart>(std::move(tensors))};
}

}  // namespace

Transport::Parts PlanningTransport::all_reduce(const Tensors& tensors,
                                               const Reduction& /*reduction*/,
                                               uint64_t /*identity*/) {
  return planned(tensors);
}

Transport::Parts PlanningTransport::reduce_scatter(const Tensors& outputs, const Tensors& inputs,
                                                   const Reduction& /*reduction*/,
                                                   uint64_t /*identity*/) {
  return planned(outputs, inputs);
}

Transport::Parts PlanningTransport::all_gather(const Tensors& outputs, const Tensors& inputs,
                                               uint64_t /*identity*/) {
  return planned(outputs, inputs);
}

Transport::Parts PlanningTransport::all_to_all(const at::Tensor& output, const at::Tensor& input,
                                               const std::vector<int64_t>& /*output_rows*/,
                                               const std::vector<int64_t>& /*input_rows*/,
                                               uint64_t /*identity*/) {
  return planned({output, input});
}

Transport::Parts PlanningTransport::broadcast(const Tensors& tensors, int /*source*/,
                                              uint64_t /*identity*/) {
  return planned(tensors);
}

Transport::Parts PlanningTransport::send(const at::Tensor& tensor, int /*destination*/,
                                         uint64_t /*identity*/) {
  if (const auto before = sent_.lock()) before->release();
  const auto part = std::make_shared<PlannedPart>(Tensors{tensor});
  sent_ = part;
  return {part};
}

Transport::Parts PlanningTransport::receive(const at::Tensor& tensor, int /*source*/,
                                            uint64_t /*identity*/) {
  return planned({tensor});
}

Transport::Parts PlanningTransport::exchange(const at::Tensor& sent, int /*destination*/,
                                             const at::Tensor& received, int /*source*/,
                                             uint64_t /*identity*/) {
  return planned({sent, received});
}

}  // namespace lockstep
