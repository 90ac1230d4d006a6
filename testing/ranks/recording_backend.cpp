#include "lockstep/testing/recording_backend.h"

#include <vector>

namespace lockstep::testing {
namespace {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

class RecordingBackend : public c10d::Backend {
 public:
  RecordingBackend(c10::intrusive_ptr<c10d::Backend> inner, BackendLog* log, std::string group,
                   int64_t global_rank)
      : Backend(inner->getRank(), inner->getSize()),
        inner_(std::move(inner)),
        log_(log),
        group_(std::move(group)),
        global_rank_(global_rank) {}

  const std::string getBackendName() const override { return "recording"; }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    note("allreduce", tensors);
    return inner_->allreduce(tensors, options);
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    note("broadcast", tensors);
    return inner_->broadcast(tensors, options);
  }

  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override {
    note("allgather", inputs);
    return inner_->allgather(outputs, inputs, options);
  }

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override {
    note("allgather", {input});
    return inner_->_allgather_base(output, input, options);
  }

  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    note("reduce_scatter", {input});
    return inner_->_reduce_scatter_base(output, input, options);
  }

  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_rows,
                        std::vector<int64_t>& input_rows,
                        const c10d::AllToAllOptions& options) override {
    note("alltoall", {input});
    return inner_->alltoall_base(output, input, output_rows, input_rows, options);
  }

  WorkPtr send(Tensors& tensors, int peer, int tag) override {
    note("send", tensors);
    return inner_->send(tensors, peer, tag);
  }

  WorkPtr recv(Tensors& tensors, int peer, int tag) override {
    note("recv", tensors);
    return inner_->recv(tensors, peer, tag);
  }

 private:
  void note(const char* operation, const Tensors& tensors) {
    int64_t bytes = 0;
    for (const at::Tensor& tensor : tensors) bytes += static_cast<int64_t>(tensor.nbytes());
    log_->add({global_rank_, group_, operation, bytes});
  }

  c10::intrusive_ptr<c10d::Backend> inner_;
  BackendLog* log_;
  std::string group_;
  int64_t global_rank_;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_recording_backend(c10::intrusive_ptr<c10d::Backend> inner,
                                                         BackendLog* log, std::string group,
                                                         int64_t global_rank) {
  return c10::make_intrusive<RecordingBackend>(std::move(inner), log, std::move(group),
                                               global_rank);
}

}  // namespace lockstep::testing
