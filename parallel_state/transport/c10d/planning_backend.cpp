#include "lockstep/parallel_state/planning_backend.h"

#include <ATen/ATen.h>

namespace lockstep {
namespace {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

/// A work that is done, with its result for c10d::Reducer.
class DoneWork : public c10d::Work {
 public:
  explicit DoneWork(const Tensors& result)
      : future_(c10::make_intrusive<c10::ivalue::Future>(
            c10::ListType::create(c10::TensorType::get()))) {
    future_->markCompleted(c10::IValue(result));
    finish();
  }
  bool wait(std::chrono::milliseconds /*timeout*/) override { return true; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

class PlanningBackend : public c10d::Backend {
 public:
  PlanningBackend(int rank, int size) : Backend(rank, size) {}

  const std::string getBackendName() const override { return "planning"; }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    for (at::Tensor& tensor : tensors) scale(tensor, options.reduceOp);
    return done(tensors);
  }

  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override {
    return allreduce(tensors, options);
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& /*options*/) override {
    return done(tensors);
  }

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& /*options*/) override {
    repeat(output, input.view(-1).clone());
    return done({output});
  }

  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& /*options*/) override {
    for (size_t i = 0; i < inputs.size(); ++i)
      for (at::Tensor& output : outputs[i]) output.copy_(inputs[i]);
    return done(inputs);
  }

  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    output.view(-1).copy_(own_part(input));
    scale(output, options.reduceOp);
    return done({output});
  }

  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_rows,
                        std::vector<int64_t>& input_rows,
                        const c10d::AllToAllOptions& /*options*/) override {
    const bool even = output.numel() == input.numel() && all_equal(output_rows) &&
                      all_equal(input_rows) && input.numel() % getSize() == 0;
    if (even)
      repeat(output, own_part(input).clone());
    else
      output.zero_();
    return done({output});
  }

  WorkPtr send(Tensors& tensors, int /*peer*/, int /*tag*/) override { return done(tensors); }

  WorkPtr recv(Tensors& tensors, int /*peer*/, int /*tag*/) override {
    for (at::Tensor& tensor : tensors) tensor.zero_();
    return done(tensors);
  }

  void shutdown() override {}

  WorkPtr barrier(const c10d::BarrierOptions& /*options*/) override { return done({}); }

 private:
  static WorkPtr done(const Tensors& tensors) { return c10::make_intrusive<DoneWork>(tensors); }

  void scale(at::Tensor& tensor, const c10d::ReduceOp& op) const {
    if (op == c10d::ReduceOp::SUM) tensor.mul_(getSize());
  }

  at::Tensor own_part(const at::Tensor& whole) const {
    const int64_t numel = whole.numel() / getSize();
    return whole.view(-1).narrow(0, getRank() * numel, numel);
  }

  void repeat(at::Tensor& output, const at::Tensor& part) const {
    output.view({getSize(), -1}).copy_(part.unsqueeze(0).expand({getSize(), part.numel()}));
  }

  static bool all_equal(const std::vector<int64_t>& values) {
    return std::adjacent_find(values.begin(), values.end(), std::not_equal_to<>()) == values.end();
  }
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_planning_backend(const BackendSpec& spec) {
  return c10::make_intrusive<PlanningBackend>(spec.rank, static_cast<int>(spec.ranks.size()));
}

}  // namespace lockstep
