#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

/// Counts the memory of CPU tensors by the thread that allocates it, whichever thread frees it. A
/// program that uses it has its own allocator from the start, so its flat buffers do not have huge
/// pages of their own.
namespace lockstep::testing {

class MemoryCounter {
 public:
  /// From now on, counts the allocations of this thread. At most one per thread.
  MemoryCounter();
  ~MemoryCounter();
  MemoryCounter(const MemoryCounter&) = delete;
  MemoryCounter& operator=(const MemoryCounter&) = delete;

  /// Bytes that were allocated since then and are not freed: now, and the peak.
  int64_t bytes() const;
  int64_t peak() const;

  /// Restarts peak() from the current bytes.
  void reset_peak();

  struct Counts;

 private:
  std::shared_ptr<Counts> counts_;
};

}  // namespace lockstep::testing
