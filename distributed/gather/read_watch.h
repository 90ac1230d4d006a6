#pragma once

// Internal.

#include <atomic>
#include <memory>

#include <ATen/core/Tensor.h>

namespace lockstep {

/// Is notified of tensors that are read.
class ReadObserver {
 public:
  /// An operator that was called on a watched thread is about to read or write `tensor`. The
  /// operator runs when this returns. Returns whether on_operator() is to be called.
  virtual bool on_read(const at::Tensor& tensor) noexcept = 0;
  /// on_read() was called for all arguments of an operator, and returned true for one or more.
  virtual void on_operator() noexcept {}

 protected:
  ~ReadObserver() = default;
};

/// Until stop(), notifies `observer` of every tensor that is an argument of a libtorch operator
/// called on this thread, or called by autograd on another thread in a backward that this thread
/// runs. C++ modules have no forward pre-hooks; this takes their place and works for every module.
/// It is an at::RecordFunction callback, which costs about a tenth of a microsecond per operator,
/// and nothing while no watch is active. Operators on other threads, and code that reads memory
/// without an operator, are not seen.
class ReadWatch {
 public:
  ~ReadWatch() { stop(); }
  ReadWatch() = default;
  ReadWatch(const ReadWatch&) = delete;
  ReadWatch& operator=(const ReadWatch&) = delete;

  /// Watches the calling thread instead of what was watched before.
  void start(ReadObserver& observer);
  void stop();
  /// Whether it watches the calling thread, or the thread whose backward that one runs.
  bool is_on_this_thread() const;

  struct Slot {
    std::atomic<ReadObserver*> observer = nullptr;
  };

 private:
  std::shared_ptr<Slot> slot_;
};

}  // namespace lockstep
