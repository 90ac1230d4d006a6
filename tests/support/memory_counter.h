#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

/// Counts the memory of CPU tensors by the thread that allocates it, whichever thread frees it. A
/// program that names it has an allocator of its own from its start, so its flat buffers have no
/// huge pages of their own.
namespace lockstep::testing {

class MemoryCounter {
 public:
  /// From now on, what this thread allocates counts here; at most one a thread.
  MemoryCounter();
  ~MemoryCounter();
  MemoryCounter(const MemoryCounter&) = delete;
  MemoryCounter& operator=(const MemoryCounter&) = delete;

  /// Bytes that were allocated since and are not freed, now and at most.
  int64_t bytes() const;
  int64_t peak() const;

  /// peak() counts from now on.
  void reset_peak();

  struct Counts;

 private:
  std::shared_ptr<Counts> counts_;
};

}  // namespace lockstep::testing
