#include "lockstep/parallel_state/host_exchange.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <optional>
#include <system_error>

#include "lockstep/core/integers.h"
#include "lockstep/core/trace_scope.h"
#include "lockstep/parallel_state/host_chunks.h"
#include "lockstep/parallel_state/host_reduction.h"
#include "lockstep/parallel_state/peer_error.h"
#include "lockstep/parallel_state/transport.h"

namespace lockstep {
namespace {

void copy_bytes(std::byte* to, const std::byte* from, int64_t bytes) {
  if (bytes > 0 && to != from) std::memcpy(to, from, static_cast<size_t>(bytes));
}

}  // namespace

bool HostTask::wait_for(std::chrono::milliseconds patience) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (!ended_.wait_for(lock, patience, [&] { return done_.load(); })) return false;
  if (error_) std::rethrow_exception(error_);
  return true;
}

void HostTask::wait(const Waiting& waiting) {
  try {
    if (exchange_->direct_reading()) {
      exchange_->run_queued(*this, [&] { check_wait(waiting); });
      look_for_a_while([this] { return done_.load(); });
    }
    wait_in_turns(waiting, [this](auto patience) { return wait_for(patience); });
  } catch (const TimedOut&) {
    const int peer = awaited_;
    const auto error = peer < 0 ? std::current_exception()
                                : std::make_exception_ptr(PeerError("", peer, ": timed out"));
    abandon(error);
    std::rethrow_exception(error);
  } catch (...) {
    abandon(std::current_exception());
    throw;
  }
}

void HostTask::abandon() {
  abandon(std::make_exception_ptr(CommunicationError("another part has failed")));
}

void HostTask::abandon(const std::exception_ptr& error) {
  if (!done_) exchange_->give_up(error);
  std::unique_lock<std::mutex> lock(mutex_);
  ended_.wait(lock, [this] { return done_.load(); });
}

bool HostTask::is_completed() const { return done_; }

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

template <class T>
std::vector<T> HostExchange::gather_now(const T& mine) {
  static_assert(std::is_trivially_copyable_v<T>);
  const at::Tensor sent = at::empty({int64_t{sizeof(T)}}, at::kByte);
  const at::Tensor found = at::empty({size_, sent.numel()}, at::kByte);
  std::memcpy(sent.data_ptr(), &mine, sizeof mine);
  const auto task = all_gather(found, sent, Transport::kUncounted);
  while (!task->wait_for(timeout_)) continue;
  std::vector<T> all(static_cast<size_t>(size_));
  std::memcpy(all.data(), found.data_ptr(), found.nbytes());
  return all;
}

bool HostExchange::agree_on_reading(bool offers_memory) {
  memory_ = std::make_unique<DirectMemory>(offers_memory);
  if (!memory_->meet(gather_now(memory_->card()))) return false;
  board_ = std::make_unique<OfferBoard>(rank_, size_);
  const auto places = gather_now(board_->place());
  // A process that cannot be read may be a stranger's, whose files are not to be opened.
  const bool can = memory_->can_read_all() && board_->open(places);
  const std::vector<char> all = gather_now(static_cast<char>(can));
  return std::find(all.begin(), all.end(), 0) == all.end();
}

void HostExchange::greet(Reading reading) {
  if (reading == Reading::never)
    gather_now('\0');
  else if (agree_on_reading(reading == Reading::offered))
    direct_.emplace(*memory_, *board_);
  if (direct_) return;
  board_.reset();
  memory_.reset();
}

HostExchange::~HostExchange() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ended_ = true;
    abandon();
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void HostExchange::abandon() {
  if (memory_) memory_->withdraw();
  for (HostMessages* messages : under_way_) messages->give_up();
}

void HostExchange::give_up(const std::exception_ptr& error) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!broken_) broken_ = error;
  abandon();
}

std::shared_ptr<HostTask> HostExchange::enqueue(uint64_t identity,
                                                std::function<void(HostTransfers&)> body) {
  auto task = std::make_shared<HostTask>();
  task->exchange_ = this;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (idle_ <= static_cast<int>(queue_.size()) && workers_.size() < kHostWorkers) add_worker();
    queue_.push_back({task, std::move(body), identity,
                      identity == Transport::kUncounted ? 0 : next_++, TraceName::current()});
  }
  wake_.notify_one();
  return task;
}

void HostExchange::add_worker() {
  try {
    workers_.emplace_back([this] { work(); });
  } catch (const std::system_error&) {  // the system has no more threads
    if (workers_.empty()) throw;
  }
}

bool HostExchange::may_start(const Entry& entry) const {
  // Where memory is read, two calls of one spot could put their offers there in either order.
  const bool counts = direct_ && entry.identity != Transport::kUncounted;
  return std::none_of(under_way_.begin(), under_way_.end(), [&](const HostMessages* messages) {
    const bool other_counts = messages->identity() != Transport::kUncounted;
    return messages->same_tags(entry.identity, entry.number) ||
           (counts && other_counts && messages->number() + OfferBoard::kCalls <= entry.number);
  });
}

void HostExchange::work() {
  HostScratch scratch;
  std::unique_lock<std::mutex> lock(mutex_);
  while (!ended_) {
    ++idle_;
    wake_.wait(lock, [&] { return ended_ || (!queue_.empty() && may_start(queue_.front())); });
    --idle_;
    if (!ended_) run_first(lock, scratch, {});
  }
}

void HostExchange::run_first(std::unique_lock<std::mutex>& lock, HostScratch& scratch,
                             const std::function<void()>& check) {
  Entry entry = std::move(queue_.front());
  queue_.pop_front();
  std::optional<HostTransfers> transfers;
  transfers.emplace(*backend_, timeout_, scratch, direct_reading(), entry.identity, entry.number,
                    check, entry.task->awaited_);
  under_way_.push_back(&transfers->messages());
  std::exception_ptr error = broken_;
  lock.unlock();
  if (!error) error = run(entry, *transfers);
  lock.lock();
  if (error && !broken_) broken_ = error;
  std::erase(under_way_, &transfers->messages());
  if (!queue_.empty()) wake_.notify_one();  // a worker may have waited for these tags
  lock.unlock();
  transfers.reset();     // after a failure Gloo may write to posted receives until they are gone
  entry.body = nullptr;  // keeps their memory; before others may go on and drop what it holds
  entry.task->end(error);
  lock.lock();
}

bool HostExchange::is_queued(const HostTask& task) const {
  return std::any_of(queue_.begin(), queue_.end(),
                     [&](const Entry& entry) { return entry.task.get() == &task; });
}

void HostExchange::run_queued(const HostTask& task, const std::function<void()>& check) {
  std::unique_lock<std::mutex> lock(mutex_);
  HostScratch scratch;
  if (!scratch_.empty()) {
    scratch = std::move(scratch_.back());
    scratch_.pop_back();
  }
  while (is_queued(task) && may_start(queue_.front())) run_first(lock, scratch, check);
  scratch_.push_back(std::move(scratch));
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
    if (transfers.direct()) {
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
