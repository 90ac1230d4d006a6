#pragma once

// Internal.

#include <set>
#include <utility>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "lockstep/parallel_state/transport.h"

namespace lockstep {

/// c10d's own collectives and messages: over NCCL for tensors on CUDA devices, over a backend that
/// answers without peers for planning ranks. GlooTransport overrides what differs for Gloo.
class C10dTransport : public Transport {
 public:
  /// For tensors on the CPU or on devices with streams. With streams, wait() makes the current
  /// stream wait, and the tensors of a call are one launch.
  C10dTransport(c10::intrusive_ptr<c10d::ProcessGroup> group, c10::Device device)
      : group_(std::move(group)), device_(device) {}

  void greet() override {}
  void connect(const Pairs& pairs) override;
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

 protected:
  c10d::ProcessGroup& group() const { return *group_; }

 private:
  /// start_one(i) -> a c10d work, for i < count.
  template <class StartOne>
  Parts start_all(size_t count, StartOne start_one);
  bool on_cpu() const { return device_.is_cpu(); }
  std::shared_ptr<Pending> message(c10::intrusive_ptr<c10d::Work> work) const;

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  c10::Device device_;
  std::set<std::pair<int, int>> connected_;
};

}  // namespace lockstep
