#include "lockstep/pipeline/transfer.h"

#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <mutex>
#include <thread>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/parallel_state/collectives.h"

namespace lockstep {
namespace {

constexpr int64_t kHeaderNumbers = 8;
constexpr int64_t kMaxDims = kHeaderNumbers - 2;

/// dtype, 1 + number of dimensions, sizes. Zeros, which a planning rank receives for a message that
/// it does not know, are no header.
at::Tensor header_of(const at::Tensor& tensor, const std::string& label) {
  require<UsageError>(tensor.dim() <= kMaxDims, "{}: found {} dimensions, allowed: at most {}",
                      label, tensor.dim(), kMaxDims);
  std::vector<int64_t> numbers = {static_cast<int64_t>(tensor.scalar_type()), 1 + tensor.dim()};
  numbers.insert(numbers.end(), tensor.sizes().begin(), tensor.sizes().end());
  numbers.resize(kHeaderNumbers);
  return at::tensor(numbers, at::kLong);
}

TensorShape shape_in(const at::Tensor& header, const TransferLabel& label) {
  const auto* const numbers = header.const_data_ptr<int64_t>();
  require<UsageError>(numbers[1] > 0,
                      "a planning rank cannot know the {}: set "
                      "PipelineExecutorOptions::activation_shape",
                      label.shape);
  return {{numbers + 2, numbers + 1 + numbers[1]}, static_cast<at::ScalarType>(numbers[0])};
}

}  // namespace

IncomingTensor::IncomingTensor(const ProcessGroup& group, c10::Device device,
                               const TensorShape& shape, int64_t source, const TransferLabel& label)
    : data_(at::empty(shape.sizes, at::TensorOptions(device).dtype(shape.dtype))),
      work_(receive(group, data_, source, label.tensor)) {}

IncomingTensor::IncomingTensor(const ProcessGroup& group, c10::Device device, int64_t source,
                               const TransferLabel& label)
    : group_(group),
      device_(device),
      source_(source),
      label_(&label),
      header_(at::empty({kHeaderNumbers}, at::kLong)),
      work_(receive(group, header_, source, label.shape)) {}

void IncomingTensor::receive_data() {
  if (!header_.defined()) return;
  work_.wait();
  *this = IncomingTensor(*group_, device_, shape_in(header_, *label_), source_, *label_);
}

at::Tensor IncomingTensor::take() {
  receive_data();
  work_.wait();
  return std::move(data_);
}

struct SendQueue::Impl {
  struct Send {
    Work work;
    std::function<void()> sent = {};
    bool is_shape = false;

    void wait() {
      work.wait();
      if (sent) sent();
    }
  };

  ~Impl() {
    {
      const std::lock_guard<std::mutex> lock(mutex);
      ended = true;
      waiting.clear();
    }
    changed.notify_all();
    if (thread.joinable()) thread.join();
  }

  void add(Send send, bool on_cpu) {
    if (!on_cpu) {
      std::erase_if(on_device, [](Send& s) {
        const bool done = s.work.is_completed();
        if (done) s.wait();
        return done;
      });
      on_device.push_back(std::move(send));
      return;
    }
    const std::lock_guard<std::mutex> lock(mutex);
    if (error) std::rethrow_exception(error);
    if (!send.is_shape) ++tensors;
    waiting.push_back(std::move(send));
    if (!thread.joinable()) thread = std::thread([this] { wait_for_sends(); });
    changed.notify_all();
  }

  void wait_for_sends() {
    std::unique_lock<std::mutex> lock(mutex);
    for (;;) {
      changed.wait(lock, [&] { return ended || !waiting.empty(); });
      if (ended) return;
      Send send = std::move(waiting.front());
      waiting.pop_front();
      busy = true;
      const size_t sends_tensor = send.is_shape ? 0 : 1;
      lock.unlock();
      try {
        send.wait();
      } catch (...) {
        lock.lock();
        error = std::current_exception();
        waiting.clear();
        lock.unlock();
      }
      send = {};
      lock.lock();
      busy = false;
      tensors -= sends_tensor;
      changed.notify_all();
    }
  }

  void wait_until_left(size_t most) {
    const size_t awaited = on_device.size() - std::min(most, on_device.size());
    const auto left = on_device.begin() + static_cast<std::ptrdiff_t>(awaited);
    std::for_each(on_device.begin(), left, [](Send& send) { send.wait(); });
    on_device.erase(on_device.begin(), left);
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return error || tensors <= most; });
    if (error) std::rethrow_exception(error);
  }

  void finish() {
    for (Send& send : on_device) send.wait();
    on_device.clear();
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return waiting.empty() && !busy; });
    if (error) std::rethrow_exception(error);
  }

  void drop() {
    on_device.clear();
    std::unique_lock<std::mutex> lock(mutex);
    waiting.clear();
    changed.wait(lock, [&] { return !busy; });
    tensors = 0;
    error = nullptr;
  }

  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Send> waiting;
  size_t tensors = 0;  ///< on the CPU, without shapes: waiting ones and the one waited for
  std::vector<Send> on_device;
  std::exception_ptr error;
  bool busy = false, ended = false;
  std::thread thread;
};

SendQueue::SendQueue() : impl_(std::make_unique<Impl>()) {}
SendQueue::~SendQueue() = default;

void SendQueue::send(const ProcessGroup& group, const at::Tensor& tensor, int64_t destination,
                     const TransferLabel& label, std::function<void()> sent) {
  impl_->add(
      {.work = lockstep::send(group, tensor, destination, label.tensor), .sent = std::move(sent)},
      tensor.is_cpu());
}

void SendQueue::send_with_shape(const ProcessGroup& group, const at::Tensor& tensor,
                                int64_t destination, const TransferLabel& label,
                                std::function<void()> sent) {
  impl_->add(
      {.work = lockstep::send(group, header_of(tensor, label.tensor), destination, label.shape),
       .is_shape = true},
      /*on_cpu=*/true);
  send(group, tensor, destination, label, std::move(sent));
}

void SendQueue::wait_until_left(size_t most) { impl_->wait_until_left(most); }

void SendQueue::finish() { impl_->finish(); }

void SendQueue::drop() { impl_->drop(); }

}  // namespace lockstep
