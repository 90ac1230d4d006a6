#include "lockstep/training/repeated_tasks.h"

#include <algorithm>
#include <vector>

#include <ATen/ATen.h>

#include "lockstep/training/planned_host.h"

namespace lockstep {
namespace {

constexpr int64_t kFirst = 1, kSecond = 2;  // the micro-batches that are compared

}  // namespace

/// Of a tensor, without its memory.
struct RepeatedTasks::Form {
  std::vector<int64_t> sizes, strides;
  at::TensorOptions options;

  static std::optional<Form> of(const at::Tensor& tensor) {
    if (!tensor.defined()) return std::nullopt;
    return Form{tensor.sizes().vec(), tensor.strides().vec(), tensor.options()};
  }
  at::Tensor make() const { return at::empty_strided(sizes, strides, options); }
  bool operator==(const Form& other) const {
    return sizes == other.sizes && strides == other.strides &&
           options.dtype() == other.options.dtype() && options.device() == other.options.device();
  }
};

/// What a task does.
struct RepeatedTasks::Task {
  RankRecorder::Passage passage;
  int64_t change = 0;  ///< of the memory in use
  int64_t rise = 0;    ///< of the memory in use, at most, above that before the task
  std::optional<Form> result;
  bool keeps_result = false;  ///< the graph refers to it

  at::Tensor make_result() const { return result ? result->make() : at::Tensor(); }
  bool operator==(const Task&) const = default;
};

struct RepeatedTasks::Known {
  std::optional<Task> task;
  bool repeats = false;  ///< it was seen twice
};

/// What a repeated forward leaves for its backward.
struct RepeatedTasks::Kept {
  int64_t bytes = 0;
  at::Tensor output;  ///< undefined unless the graph refers to it
};

RepeatedTasks::RepeatedTasks(RankRecorder& recorder, PlannedMemory& memory)
    : recorder_(recorder), memory_(memory) {}

RepeatedTasks::~RepeatedTasks() = default;

void RepeatedTasks::begin(int64_t num_microbatches, bool forward_only) {
  num_microbatches_ = num_microbatches;
  forward_only_ = forward_only;
  forwards_.clear();
  backwards_.clear();
  in_flight_.clear();
}

bool RepeatedTasks::is_learned(int64_t microbatch) const {
  return microbatch > kSecond && microbatch + 1 < num_microbatches_;
}

at::Tensor RepeatedTasks::run(Known& known, int64_t microbatch, const Compute& compute) {
  if (microbatch != kFirst && microbatch != kSecond) return compute();
  const RankRecorder::Mark begin = recorder_.mark();
  const int64_t before = memory_.bytes, peak = std::exchange(memory_.peak, before);
  at::Tensor result = compute();
  Task task = {.passage = {},
               .change = memory_.bytes - before,
               .rise = memory_.peak - before,
               .result = Form::of(result)};
  memory_.peak = std::max(memory_.peak, peak);
  task.keeps_result =
      result.defined() && (result.use_count() > 1 || result.storage().use_count() > 1);
  auto passage = recorder_.since(begin);
  const bool again = microbatch == kSecond && known.task.has_value();
  if (passage) task.passage = *std::move(passage);
  known.repeats = again && passage && *known.task == task;
  known.task = passage ? std::optional(std::move(task)) : std::nullopt;
  return result;
}

void RepeatedTasks::repeat(const Task& task) {
  ++repeated_;
  recorder_.repeat(task.passage);
  memory_.peak = std::max(memory_.peak, memory_.bytes + task.rise);
}

at::Tensor RepeatedTasks::forward(int64_t chunk, int64_t microbatch, const Compute& compute) {
  Known& known = forwards_[chunk];
  if (!known.repeats || !is_learned(microbatch)) return run(known, microbatch, compute);
  const int64_t before = memory_.bytes;
  repeat(*known.task);
  at::Tensor output = known.task->make_result();
  Kept kept = {.bytes = before + known.task->change - memory_.bytes, .output = {}};
  if (kept.bytes < 0 || (forward_only_ && kept.bytes > 0)) failed_ = true;
  if (forward_only_) return output;
  if (known.task->keeps_result) kept.output = output;
  memory_.bytes += kept.bytes;
  in_flight_[{chunk, microbatch}] = std::move(kept);
  return output;
}

at::Tensor RepeatedTasks::backward(int64_t chunk, int64_t microbatch, const Compute& compute,
                                   const std::function<void()>& note_backward) {
  Known& known = backwards_[chunk];
  auto kept = in_flight_.extract({chunk, microbatch});
  if (kept.empty()) return run(known, microbatch, compute);
  if (!known.repeats) {
    failed_ = true;
    note_backward();  // so that the step ends
    return known.task ? known.task->make_result() : at::Tensor();
  }
  const int64_t before = memory_.bytes;
  repeat(*known.task);
  const RankRecorder::Mark done = recorder_.mark();
  note_backward();
  if (recorder_.mark() != done) failed_ = true;
  memory_.bytes -= kept.mapped().bytes;
  kept = {};  // may hold the output
  at::Tensor gradient = known.task->make_result();
  if (memory_.bytes != before + known.task->change) failed_ = true;
  return gradient;
}

}  // namespace lockstep
