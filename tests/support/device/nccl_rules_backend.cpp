#include "lockstep/tests/support/device/nccl_rules_backend.h"

#include <algorithm>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "lockstep/tests/support/device/nccl_calls.h"

namespace lockstep::testing {
namespace {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

const at::Tensor& only(const Tensors& tensors) {
  TORCH_CHECK_VALUE(tensors.size() == 1, "found ", tensors.size(), " tensors, allowed: one");
  return tensors.front();
}

/// The tensors of the only list; none if there is no list.
const Tensors& only(const std::vector<Tensors>& lists) {
  static const Tensors& none = *new Tensors;
  TORCH_CHECK_VALUE(lists.size() <= 1, "found ", lists.size(), " lists, allowed: one");
  return lists.empty() ? none : lists.front();
}

bool of_one_size(const Tensors& tensors) {
  return std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor& tensor) {
    return tensor.is_same_size(tensors.front());
  });
}

class NcclRulesBackend : public c10d::Backend {
 public:
  NcclRulesBackend(const BackendSpec& spec, c10::Device device, std::shared_ptr<NcclRules> rules)
      : Backend(spec.rank, static_cast<int>(spec.ranks.size())),
        caller_{device, spec.rank, static_cast<int>(spec.ranks.size())},
        launches_(spec, device, std::move(rules)) {}

  const std::string getBackendName() const override { return "nccl rules"; }
  bool supportsCoalescing() const override { return true; }
  void setTimeout(std::chrono::milliseconds timeout) override { launches_.set_timeout(timeout); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return launches_.sequence(); }
  void eagerConnectSingleDevice(at::Device /*device*/) override { launches_.connect_eagerly(); }
  void shutdown() override { launches_.shutdown(); }
  void abort() override { launches_.abort(); }
  void startCoalescing() override { launches_.begin_batch(); }
  WorkPtr endCoalescing() override { return launches_.end_batch(); }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return run(all_reduce_call(caller_, {only(tensors)}, options.reduceOp), options);
  }

  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override {
    return run(all_reduce_call(caller_, tensors, options.reduceOp), options);
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    const at::Tensor& tensor = only(tensors);
    return run(reduce_call(caller_, tensor, tensor, options.reduceOp, options.rootRank), options);
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    const at::Tensor& tensor = only(tensors);
    return run(broadcast_call(caller_, tensor, tensor, options.rootRank), options);
  }

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override {
    return run(all_gather_call(caller_, {output}, {input}), options);
  }

  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override {
    return run(all_gather_call(caller_, outputs, inputs), options);
  }

  /// Tensors of different sizes become broadcasts, in one batch.
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override {
    const at::Tensor& input = only(inputs);
    const Tensors& to = only(outputs);
    if (of_one_size(to)) return run(all_gather_list_call(caller_, to, input), options);
    launches_.begin_batch();
    for (size_t i = 0; i < to.size(); ++i) {
      const auto root = static_cast<int64_t>(i);
      run(broadcast_call(caller_, to[i], root == rank_ ? input : to[i], root), options);
    }
    return launches_.end_batch();
  }

  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    return run(reduce_scatter_call(caller_, {output}, {input}, options.reduceOp), options);
  }

  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    return run(reduce_scatter_call(caller_, outputs, inputs, options.reduceOp), options);
  }

  /// Tensors of different sizes become reductions, in one batch.
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    const at::Tensor& output = only(outputs);
    const Tensors& from = only(inputs);
    if (of_one_size(from))
      return run(reduce_scatter_list_call(caller_, output, from, options.reduceOp), options);
    launches_.begin_batch();
    for (size_t i = 0; i < from.size(); ++i) {
      const auto root = static_cast<int64_t>(i);
      run(reduce_call(caller_, root == rank_ ? output : from[i], from[i], options.reduceOp, root),
          options);
    }
    return launches_.end_batch();
  }

  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_rows,
                        std::vector<int64_t>& input_rows,
                        const c10d::AllToAllOptions& options) override {
    return run(all_to_all_call(caller_, output, input, output_rows, input_rows), options);
  }

  WorkPtr alltoall(Tensors& outputs, Tensors& inputs,
                   const c10d::AllToAllOptions& options) override {
    return run(all_to_all_list_call(caller_, outputs, inputs), options);
  }

  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override {
    return run(gather_call(caller_, only(outputs), only(inputs), options.rootRank), options);
  }

  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& options) override {
    return run(scatter_call(caller_, only(outputs), only(inputs), options.rootRank), options);
  }

  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    return run(barrier_call(caller_), options);
  }

  WorkPtr send(Tensors& tensors, int peer, int /*tag*/) override {
    return message(only(tensors), peer, "send");
  }

  WorkPtr recv(Tensors& tensors, int peer, int /*tag*/) override {
    return message(only(tensors), peer, "recv");
  }

 private:
  template <class Options>
  WorkPtr run(NcclCall call, const Options& options) {
    call.async = options.asyncOp;
    return launches_.collective(std::move(call));
  }

  WorkPtr message(const at::Tensor& tensor, int peer, const std::string& kind) {
    check_nccl_tensors(caller_, {tensor}, kind);
    return launches_.message(tensor, check_nccl_rank(caller_, peer, kind), kind == "send");
  }

  NcclCaller caller_;
  NcclLaunches launches_;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_nccl_rules_backend(const BackendSpec& spec,
                                                          c10::Device device,
                                                          std::shared_ptr<NcclRules> rules) {
  if (!rules) rules = std::make_shared<NcclRules>();
  return c10::make_intrusive<NcclRulesBackend>(spec, device, std::move(rules));
}

}  // namespace lockstep::testing
