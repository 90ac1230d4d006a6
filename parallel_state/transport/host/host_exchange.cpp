#include "lockstep/parallel_state/host_exchange.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <optional>

#include "lockstep/core/integers.h"
#include "lockstep/core/trace_scope.h"
#include "lockstep/parallel_state/host_chunks.h"
#include "lockstep/parallel_state/host_reduction.h"
#include "lockstep/parallel_state/transport.h"

namespace lockstep {
namespace {

void copy_bytes(std::byte* to, const std::byte* from, int64_t bytes) {
  if (bytes > 0 && to != from) std::memcpy(to, from, static_cast<size_t>(bytes));
}

}  // namespace

bool HostTask::wait_for(std::chrono::milliseconds patience) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (!ended_.wait_for(lock, patience, [&] { return done_; })) return false;
  if (error_) std::rethrow_exception(error_);
  return true;
}

void HostTask::wait(const Waiting& waiting) {
  wait_in_turns(waiting, [this](auto patience) { return wait_for(patience); });
}

bool HostTask::is_completed() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return done_;
}

void HostTask::end(std::exception_ptr error) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    done_ = true;
    error_ = std::move(error);
  }
  ended_.notify_all();
}

HostExchange::HostExchange(c10::intrusive_ptr<c10d::Backend> backend,
                           std::chrono::milliseconds timeout)
    : backend_(std::move(backend)),
      timeout_(timeout),
      rank_(backend_->getRank()),
      size_(backend_->getSize()) {}

at::Tensor HostExchange::gather_now(const at::Tensor& mine) {
  at::Tensor all = at::empty({size_, mine.numel()}, at::kByte);
  const auto task = all_gather(all, mine, Transport::kUncounted);
  while (!task->wait_for(timeout_)) continue;
  return all;
}

bool HostExchange::agree_on_reading(bool offers_memory) {
  memory_ = std::make_unique<DirectMemory>(offers_memory);
  const at::Tensor mine = at::empty({int64_t{sizeof(DirectMemory::Card)}}, at::kByte);
  const DirectMemory::Card card = memory_->card();
  std::memcpy(mine.data_ptr(), &card, sizeof card);
  const at::Tensor all = gather_now(mine);
  std::vector<DirectMemory::Card> cards(static_cast<size_t>(size_));
  std::memcpy(cards.data(), all.data_ptr(), all.nbytes());
  if (!memory_->meet(std::move(cards))) return false;
  const at::Tensor can = at::full({1}, memory_->can_read_all() ? 1 : 0, at::kByte);
  return gather_now(can).all().item<bool>();
}

void HostExchange::greet(Reading reading) {
  if (reading == Reading::never)
    gather_now(at::zeros({1}, at::kByte));
  else
    direct_ = agree_on_reading(reading == Reading::offered);
}

HostExchange::~HostExchange() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ended_ = true;
    if (memory_) memory_->withdraw();
    for (HostMessages* messages : under_way_) messages->give_up();
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

std::shared_ptr<HostTask> HostExchange::enqueue(uint64_t identity,
                                                std::function<void(HostTransfers&)> body) {
  auto task = std::make_shared<HostTask>();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back({task, std::move(body), identity,
                      identity == Transport::kUncounted ? 0 : next_++, TraceName::current()});
    if (idle_ < static_cast<int>(queue_.size()) && workers_.size() < kHostWorkers)
      workers_.emplace_back([this] { work(); });
  }
  wake_.notify_one();
  return task;
}

bool HostExchange::may_start(const Entry& entry) const {
  return std::none_of(under_way_.begin(), under_way_.end(), [&](const HostMessages* messages) {
    return messages->same_tags(entry.identity, entry.number);
  });
}

void HostExchange::work() {
  at::Tensor scratch;
  std::unique_lock<std::mutex> lock(mutex_);
  while (!ended_) {
    ++idle_;
    wake_.wait(lock, [&] { return ended_ || (!queue_.empty() && may_start(queue_.front())); });
    --idle_;
    if (ended_) break;
    Entry entry = std::move(queue_.front());
    queue_.pop_front();
    std::optional<HostTransfers> transfers;
    transfers.emplace(*backend_, timeout_, scratch, direct_memory(), entry.identity, entry.number);
    under_way_.push_back(&transfers->messages());
    std::exception_ptr error = broken_;
    lock.unlock();
    if (!error) error = run(entry, *transfers);
    lock.lock();
    if (error) broken_ = error;
    std::erase(under_way_, &transfers->messages());
    wake_.notify_one();  // the other worker may have waited for these tags
    lock.unlock();
    transfers.reset();     // after a failure Gloo may write to posted receives until they are gone
    entry.body = nullptr;  // keeps their memory; before others may go on and drop what it holds
    entry.task->end(error);
    lock.lock();
  }
}

std::exception_ptr HostExchange::run(const Entry& entry, HostTransfers& transfers) {
  std::optional<TraceScope> scope;
  if (!entry.trace_name.empty()) scope.emplace([&] { return entry.trace_name; });
  const TraceSilence without_names_of_c10d(scope.has_value());
  try {
    entry.body(transfers);
    transfers.finish();
    return nullptr;
  } catch (const std::exception&) {
    if (memory_) memory_->withdraw();
    transfers.messages().give_up();
    return std::current_exception();
  }
}

std::shared_ptr<HostTask> HostExchange::all_reduce(const at::Tensor& tensor,
                                                   const HostReduction& reduction,
                                                   uint64_t identity) {
  HostSlices slices(tensor.detach(), ceil_div(tensor.numel(), int64_t{size_}));
  slices.gather = true;
  slices.output = slices.input.narrow(0, slices.begin(rank_), slices.numel_of(rank_));
  return enqueue(identity, [=, this](HostTransfers& transfers) {
    reduce_slices(transfers, slices, reduction, rank_, size_);
  });
}

std::shared_ptr<HostTask> HostExchange::reduce_scatter(const at::Tensor& output,
                                                       const at::Tensor& input,
                                                       const HostReduction& reduction,
                                                       uint64_t identity) {
  HostSlices slices(input.detach(), output.numel());
  slices.output = output.detach();
  return enqueue(identity, [=, this](HostTransfers& transfers) {
    reduce_slices(transfers, slices, reduction, rank_, size_);
  });
}

std::shared_ptr<HostTask> HostExchange::all_gather(const at::Tensor& output,
                                                   const at::Tensor& input, uint64_t identity) {
  return enqueue(
      identity, [this, output = output.detach(), input = input.detach()](HostTransfers& transfers) {
        const auto bytes = static_cast<int64_t>(input.nbytes());
        const auto part = [&](int rank) { return bytes_of(output) + rank * bytes; };
        for (int step = 1; step < size_; ++step) {
          const int from = (rank_ + size_ - step) % size_;
          transfers.receive(part(from), bytes, from);
        }
        for (int step = 1; step < size_; ++step)
          transfers.send(bytes_of(input), bytes, (rank_ + step) % size_);
        copy_bytes(part(rank_), bytes_of(input), bytes);
      });
}

std::shared_ptr<HostTask> HostExchange::all_to_all(const at::Tensor& output,
                                                   const at::Tensor& input,
                                                   std::vector<int64_t> output_bytes,
                                                   std::vector<int64_t> input_bytes,
                                                   uint64_t identity) {
  return enqueue(identity, [this, output = output.detach(), input = input.detach(),
                            output_bytes = std::move(output_bytes),
                            input_bytes = std::move(input_bytes)](HostTransfers& transfers) {
    const auto starts = [](const std::vector<int64_t>& bytes) {
      std::vector<int64_t> result(bytes.size());
      std::exclusive_scan(bytes.begin(), bytes.end(), result.begin(), int64_t{0});
      return result;
    };
    const std::vector<int64_t> to = starts(output_bytes), from = starts(input_bytes);
    for (int step = 1; step < size_; ++step) {
      const auto source = static_cast<size_t>((rank_ + size_ - step) % size_);
      transfers.receive(bytes_of(output) + to[source], output_bytes[source],
                        static_cast<int>(source));
    }
    for (int step = 1; step < size_; ++step) {
      const auto peer = static_cast<size_t>((rank_ + step) % size_);
      transfers.send(bytes_of(input) + from[peer], input_bytes[peer], static_cast<int>(peer));
    }
    const auto own = static_cast<size_t>(rank_);
    copy_bytes(bytes_of(output) + to[own], bytes_of(input) + from[own], input_bytes[own]);
  });
}

std::shared_ptr<HostTask> HostExchange::broadcast(const at::Tensor& tensor, int source,
                                                  uint64_t identity) {
  return enqueue(identity, [this, source, tensor = tensor.detach()](HostTransfers& transfers) {
    const auto bytes = static_cast<int64_t>(tensor.nbytes());
    if (transfers.direct(bytes)) {
      for (int step = 1; rank_ == source && step < size_; ++step)
        transfers.send(bytes_of(tensor), bytes, (rank_ + step) % size_);
      if (rank_ != source) transfers.receive(bytes_of(tensor), bytes, source);
      return;
    }
    HostMessages& messages = transfers.messages();
    const int place = (rank_ - source + size_) % size_;  // in the tree; the source is its root
    int subtree = 1;
    while (subtree < size_ && place % (2 * subtree) == 0) subtree *= 2;
    if (place != 0)
      messages.wait(messages.receive(bytes_of(tensor), bytes, (rank_ - subtree + size_) % size_));
    for (int step = subtree / 2; step > 0; step /= 2)
      if (place + step < size_) messages.send(bytes_of(tensor), bytes, (rank_ + step) % size_);
  });
}

}  // namespace lockstep
