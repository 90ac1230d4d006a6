#pragma once

#include <cstdint>
#include <functional>
#include <unordered_map>
#include <utility>
#include <vector>

namespace lockstep {

/// Weight gradients that backward leaves for later, as zero-bubble schedules require: a backward
/// that runs while deferring() computes the gradients of inputs, biases and norms, and adds a task
/// for the gradient of each linear layer's weight. A task adds into the parameter's gradient and
/// calls the parameter's post-accumulate-gradient hook, as autograd would have done, and as part of
/// that backward (CapturesAccumulate). For one rank, whose backwards do not run at the same time.
class DeferredGradients {
 public:
  using Task = std::function<void()>;

  /// Sets whether backwards from now on leave weight gradients for later.
  void defer(bool on) { deferring_ = on; }
  bool deferring() const { return deferring_; }

  /// For layers, inside a backward that defers.
  void add(Task task) { tasks_.push_back(std::move(task)); }

  /// For layers: notes that backward number `pass` reaches the weight `weight`. False if the last
  /// backward that reached it was this same one.
  bool note_use(const void* weight, int64_t pass) {
    const auto [last, is_new] = last_pass_.try_emplace(weight, pass);
    return std::exchange(last->second, pass) != pass || is_new;
  }

  /// The tasks that were added since the last call, for the caller to run once each, in order, with
  /// gradients off. They keep activations alive until then.
  std::vector<Task> take() { return std::exchange(tasks_, {}); }

 private:
  bool deferring_ = false;
  std::vector<Task> tasks_;
  std::unordered_map<const void*, int64_t> last_pass_;
};

}  // namespace lockstep
