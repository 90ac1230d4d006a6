#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

#include <c10/core/CPUAllocator.h>

namespace lockstep::testing {

/// Counts the bytes of CPU tensors that the thread that makes it allocates while it lives, until
/// they are freed, by whatever thread. One at a time on a thread.
class AllocationCounter {
 public:
  AllocationCounter() {
    static Allocator* const allocator = [] {
      auto* const made = new Allocator(c10::GetCPUAllocator());  // tensors may outlive everything
      c10::SetCPUAllocator(made, /*priority=*/100);
      return made;
    }();
    (void)allocator;
    current() = count_;
  }
  ~AllocationCounter() { current() = nullptr; }
  AllocationCounter(const AllocationCounter&) = delete;
  AllocationCounter& operator=(const AllocationCounter&) = delete;

  int64_t bytes() const { return count_->bytes; }
  int64_t peak() const { return count_->peak; }

 private:
  struct Count {
    std::atomic<int64_t> bytes = 0;
    int64_t peak = 0;  ///< of the thread that allocates
  };

  static std::shared_ptr<Count>& current() {
    static thread_local std::shared_ptr<Count> count;
    return count;
  }

  struct Block {
    c10::DataPtr memory;
    int64_t bytes;
    std::shared_ptr<Count> count;
  };

  class Allocator : public c10::Allocator {
   public:
    explicit Allocator(c10::Allocator* inner) : inner_(inner) { instance() = this; }

    c10::DataPtr allocate(size_t size) override {
      c10::DataPtr memory = inner_->allocate(size);
      void* const data = memory.get();
      const c10::Device device = memory.device();
      if (const std::shared_ptr<Count> count = current(); count && data) {
        const auto bytes = static_cast<int64_t>(size);
        count->peak = std::max(count->peak, count->bytes += bytes);
        const std::lock_guard<std::mutex> lock(mutex_);
        blocks_.emplace(data, Block{std::move(memory), bytes, count});
      } else {
        memory.release_context();
      }
      return {data, data, &Allocator::release, device};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &Allocator::release; }
    void copy_data(void* to, const void* from, size_t size) const override {
      default_copy_data(to, from, size);
    }

   private:
    static Allocator*& instance() {
      static Allocator* allocator = nullptr;
      return allocator;
    }
    static void release(void* data) { instance()->free(data); }
    void free(void* data) {
      std::unique_lock<std::mutex> lock(mutex_);
      const auto block = blocks_.find(data);
      if (block == blocks_.end()) {
        lock.unlock();
        inner_->raw_deleter()(data);
        return;
      }
      const Block counted = std::move(block->second);
      blocks_.erase(block);
      lock.unlock();
      counted.count->bytes -= counted.bytes;
    }

    c10::Allocator* inner_;
    std::mutex mutex_;
    std::unordered_map<void*, Block> blocks_;  ///< that are counted
  };

  std::shared_ptr<Count> count_ = std::make_shared<Count>();
};

}  // namespace lockstep::testing
