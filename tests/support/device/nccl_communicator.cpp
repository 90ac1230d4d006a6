#include "lockstep/tests/support/device/nccl_communicator.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

namespace lockstep::testing {
namespace {

using Kind = CollectiveTask::Kind;
using Collectives = std::vector<const CollectiveTask*>;  ///< one for each member

int64_t item_of(const CollectiveTask& task) {
  return static_cast<int64_t>(c10::elementSize(task.dtype));
}
int64_t bytes_of_task(const CollectiveTask& task) { return task.count * item_of(task); }

bool alike(const CollectiveTask& a, const CollectiveTask& b) {
  return a.kind == b.kind && a.root == b.root && bytes_of_task(a) == bytes_of_task(b);
}

const std::byte* input_at(const CollectiveTask& task, int64_t byte) {
  return static_cast<const std::byte*>(task.input) + byte;
}

/// Reduces the terms of all members, starting at byte `from_byte` of their inputs.
std::vector<std::byte> reduced(const Collectives& tasks, int64_t from_byte) {
  const CollectiveTask& first = *tasks.front();
  std::vector<NcclTerm> terms;
  terms.reserve(tasks.size());
  for (const CollectiveTask* task : tasks)
    terms.push_back({input_at(*task, from_byte), task->reduction});
  std::vector<std::byte> result(static_cast<size_t>(bytes_of_task(first)));
  reduce_in_rank_order(first.dtype, terms, first.count, result.data());
  return result;
}

void reduce_to(const Collectives& tasks, const std::vector<int>& receivers) {
  const std::vector<std::byte> result = reduced(tasks, 0);
  for (const int member : receivers)
    std::memcpy(tasks[static_cast<size_t>(member)]->output, result.data(), result.size());
}

/// Reduces all parts before writing any: outputs may be parts of the inputs.
void reduce_and_scatter(const Collectives& tasks) {
  std::vector<std::vector<std::byte>> parts;
  for (size_t member = 0; member < tasks.size(); ++member)
    parts.push_back(reduced(tasks, static_cast<int64_t>(member) * bytes_of_task(*tasks.front())));
  for (size_t member = 0; member < tasks.size(); ++member)
    std::memcpy(tasks[member]->output, parts[member].data(), parts[member].size());
}

/// Copies the bytes of `source` to the same place in the outputs of all members.
void copy_to_all(const Collectives& tasks, const CollectiveTask& source, int64_t to_byte) {
  for (const CollectiveTask* task : tasks)
    std::memmove(static_cast<std::byte*>(task->output) + to_byte, source.input,
                 static_cast<size_t>(bytes_of_task(source)));
}

void carry_out(const Collectives& tasks) {
  const CollectiveTask& first = *tasks.front();
  std::vector<int> all(tasks.size());
  for (size_t member = 0; member < all.size(); ++member) all[member] = static_cast<int>(member);
  switch (first.kind) {
    case Kind::all_reduce:
      return reduce_to(tasks, all);
    case Kind::reduce:
      return reduce_to(tasks, {first.root});
    case Kind::broadcast:
      return copy_to_all(tasks, *tasks[static_cast<size_t>(first.root)], 0);
    case Kind::all_gather:
      for (size_t member = 0; member < tasks.size(); ++member)
        copy_to_all(tasks, *tasks[member], static_cast<int64_t>(member) * bytes_of_task(first));
      return;
    case Kind::reduce_scatter:
      return reduce_and_scatter(tasks);
  }
}

struct Registry {
  std::mutex mutex;
  int64_t last_id = 0;
  std::map<int64_t, std::weak_ptr<NcclCommunicator>> communicators;
};

/// Never destroyed: threads may use it until the process ends.
Registry& registry() {
  static Registry& the_one = *new Registry;
  return the_one;
}

}  // namespace

NcclCommunicator::NcclCommunicator(int size)
    : size_(size),
      aborted_(static_cast<size_t>(size), false),
      collectives_(static_cast<size_t>(size), 0) {}

std::shared_ptr<NcclCommunicator> NcclCommunicator::make(int size, int64_t* id) {
  auto made = std::make_shared<NcclCommunicator>(size);
  Registry& known = registry();
  const std::lock_guard<std::mutex> lock(known.mutex);
  std::erase_if(known.communicators, [](const auto& entry) { return entry.second.expired(); });
  *id = ++known.last_id;
  known.communicators[*id] = made;
  return made;
}

std::shared_ptr<NcclCommunicator> NcclCommunicator::find(int64_t id) {
  Registry& known = registry();
  const std::lock_guard<std::mutex> lock(known.mutex);
  const auto found = known.communicators.find(id);
  return found == known.communicators.end() ? nullptr : found->second.lock();
}

bool NcclCommunicator::join(int member) {
  std::unique_lock<std::mutex> lock(mutex_);
  joined_.insert(member);
  changed_.notify_all();
  const auto all = [&] { return joined_.size() == static_cast<size_t>(size_); };
  changed_.wait(lock, [&] { return all() || aborted_[static_cast<size_t>(member)]; });
  return all();
}

std::vector<NcclCommunicator::End> NcclCommunicator::unconnected(
    int member, const std::vector<KernelTask>& tasks) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::set<End> ends;
  for (const KernelTask& task : tasks)
    if (const auto* message = std::get_if<MessageTask>(&task)) {
      const End end =
          message->sends ? End{member, message->peer, true} : End{message->peer, member, false};
      if (!connected_.contains(end)) ends.insert(end);
    }
  return {ends.begin(), ends.end()};
}

bool NcclCommunicator::connect(int member, const std::vector<End>& ends) {
  std::unique_lock<std::mutex> lock(mutex_);
  connected_.insert(ends.begin(), ends.end());
  changed_.notify_all();
  const auto met = [&] {
    return std::all_of(ends.begin(), ends.end(), [&](const End& end) {
      return connected_.contains({end.from, end.to, !end.sends});
    });
  };
  changed_.wait(lock, [&] { return met() || aborted_[static_cast<size_t>(member)]; });
  return met();
}

bool NcclCommunicator::run(int member, const std::vector<KernelTask>& tasks) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto released = [&] { return aborted_[static_cast<size_t>(member)]; };
  if (released()) return false;
  std::vector<Posted> kernel;
  kernel.reserve(tasks.size());
  for (const KernelTask& task : tasks) kernel.push_back({&task, member});
  for (Posted& posted : kernel) post(posted);
  const auto done = [&] {
    return std::all_of(kernel.begin(), kernel.end(), [](const Posted& p) { return p.done; });
  };
  changed_.wait(lock, [&] { return done() || released(); });
  if (done()) return true;
  withdraw(kernel);
  return false;
}

void NcclCommunicator::abort(int member) {
  const std::lock_guard<std::mutex> lock(mutex_);
  aborted_[static_cast<size_t>(member)] = true;
  changed_.notify_all();
}

void NcclCommunicator::post(Posted& posted) {
  if (const auto* message = std::get_if<MessageTask>(posted.task))
    post_message(posted, *message);
  else
    post_collective(posted);
}

void NcclCommunicator::post_collective(Posted& posted) {
  const auto member = static_cast<size_t>(posted.member);
  const int64_t position = collectives_[member]++;
  Meeting& meeting = meetings_[position];
  meeting.resize(static_cast<size_t>(size_));
  meeting[member] = &posted;
  Collectives tasks;
  for (const Posted* of_member : meeting) {
    if (of_member == nullptr) return;
    tasks.push_back(&std::get<CollectiveTask>(*of_member->task));
    if (!alike(*tasks.front(), *tasks.back())) return;
  }
  carry_out(tasks);
  for (Posted* of_member : meeting) of_member->done = true;
  meetings_.erase(position);
  changed_.notify_all();
}

void NcclCommunicator::post_message(Posted& posted, const MessageTask& task) {
  const std::pair<int, int> direction =
      task.sends ? std::pair{posted.member, task.peer} : std::pair{task.peer, posted.member};
  auto& [sends, receives] = messages_[direction];
  (task.sends ? sends : receives).push_back(&posted);
  while (!sends.empty() && !receives.empty()) {
    const auto& from = std::get<MessageTask>(*sends.front()->task);
    const auto& to = std::get<MessageTask>(*receives.front()->task);
    if (from.bytes != to.bytes) return;
    if (to.bytes > 0) std::memmove(to.data, from.data, static_cast<size_t>(to.bytes));
    sends.front()->done = receives.front()->done = true;
    sends.pop_front();
    receives.pop_front();
    changed_.notify_all();
  }
}

void NcclCommunicator::withdraw(const std::vector<Posted>& kernel) {
  const auto is_own = [&](const Posted* posted) {
    return posted >= kernel.data() && posted < kernel.data() + kernel.size();
  };
  for (auto& [position, meeting] : meetings_)
    std::replace_if(meeting.begin(), meeting.end(), is_own, nullptr);
  for (auto& [direction, waiting] : messages_) {
    std::erase_if(waiting.sends, is_own);
    std::erase_if(waiting.receives, is_own);
  }
}

}  // namespace lockstep::testing
