#include "lockstep/tests/support/recording_backend.h"

namespace lockstep::testing {
namespace {

class RecordingBackend : public c10d::Backend {
 public:
  RecordingBackend(c10::intrusive_ptr<c10d::Backend> inner, CollectiveLog* log, std::string group,
                   int64_t global_rank)
      : Backend(inner->getRank(), inner->getSize()),
        inner_(std::move(inner)),
        log_(log),
        group_(std::move(group)),
        global_rank_(global_rank) {}

  const std::string getBackendName() const override { return "recording"; }

  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override {
    note("allreduce", tensors, options.reduceOp.op_);
    return inner_->allreduce(tensors, options);
  }

  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& options) override {
    note("broadcast", tensors);
    return inner_->broadcast(tensors, options);
  }

  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                           std::vector<at::Tensor>& inputs,
                                           const c10d::AllgatherOptions& options) override {
    note("allgather", inputs);
    return inner_->allgather(outputs, inputs, options);
  }

  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions& options) override {
    note("allgather", {input});
    return inner_->_allgather_base(output, input, options);
  }

 private:
  void note(const char* operation, const std::vector<at::Tensor>& tensors,
            c10d::ReduceOp::RedOpType reduce_op = c10d::ReduceOp::UNUSED) {
    int64_t bytes = 0;
    for (const at::Tensor& tensor : tensors) bytes += static_cast<int64_t>(tensor.nbytes());
    log_->add({global_rank_, group_, operation, bytes, tensors.front().scalar_type(), reduce_op});
  }

  c10::intrusive_ptr<c10d::Backend> inner_;
  CollectiveLog* log_;
  std::string group_;
  int64_t global_rank_;
};

}  // namespace

void CollectiveLog::add(RecordedCollective call) {
  const std::lock_guard<std::mutex> lock(mutex_);
  calls_.push_back(std::move(call));
}

void CollectiveLog::clear() {
  const std::lock_guard<std::mutex> lock(mutex_);
  calls_.clear();
}

std::vector<RecordedCollective> CollectiveLog::of_rank(int64_t rank) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<RecordedCollective> result;
  for (const RecordedCollective& call : calls_)
    if (call.rank == rank) result.push_back(call);
  return result;
}

c10::intrusive_ptr<c10d::Backend> make_recording_backend(c10::intrusive_ptr<c10d::Backend> inner,
                                                         CollectiveLog* log, std::string group,
                                                         int64_t global_rank) {
  return c10::make_intrusive<RecordingBackend>(std::move(inner), log, std::move(group),
                                               global_rank);
}

}  // namespace lockstep::testing
