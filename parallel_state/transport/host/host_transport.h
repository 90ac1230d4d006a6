#pragma once

// Internal.

#include "lockstep/parallel_state/c10d_transport.h"
#include "lockstep/parallel_state/host_exchange.h"
#include "lockstep/parallel_state/host_messenger.h"

namespace lockstep {

/// Collectives of CPU tensors by a HostExchange, messages by a HostMessenger; messages are Gloo's
/// where the ranks do not read each other's memory.
class HostTransport : public C10dTransport {
 public:
  using Reading = HostExchange::Reading;

  /// Uses the group's backend for CPU tensors.
  HostTransport(c10::intrusive_ptr<c10d::ProcessGroup> group, std::chrono::milliseconds timeout,
                Reading reading);

  void greet() override;
  std::optional<int64_t> bytes_read() const override;
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

 private:
  HostReduction host_reduction(const Reduction& reduction) const;

  HostExchange exchange_;
  Reading reading_;
  std::optional<HostMessenger> messenger_;  ///< destroyed first: it uses the exchange's memory
};

}  // namespace lockstep
