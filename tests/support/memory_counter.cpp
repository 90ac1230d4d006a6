#include "lockstep/tests/support/memory_counter.h"

#include <mutex>
#include <unordered_map>
#include <utility>

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

namespace lockstep::testing {

struct MemoryCounter::Counts {
  std::atomic<int64_t> bytes = 0, peak = 0;

  void add(int64_t change) {
    const int64_t now = bytes += change;
    int64_t most = peak;
    while (now > most && !peak.compare_exchange_weak(most, now)) {
    }
  }
};

namespace {

thread_local std::shared_ptr<MemoryCounter::Counts> counts_of_thread;

/// One counted allocation.
struct Block {
  c10::DataPtr memory;
  std::shared_ptr<MemoryCounter::Counts> counts;
  int64_t bytes;
};

/// The pointers are their own contexts, as raw_allocate() requires.
class CountingAllocator final : public c10::Allocator {
 public:
  explicit CountingAllocator(c10::Allocator* inner) : inner_(inner) { instance() = this; }

  c10::DataPtr allocate(size_t size) override {
    c10::DataPtr memory = inner_->allocate(size);
    void* const data = memory.get();
    if (counts_of_thread && data) {
      const auto bytes = static_cast<int64_t>(size);
      counts_of_thread->add(bytes);
      const std::lock_guard<std::mutex> lock(mutex_);
      blocks_.emplace(data, Block{std::move(memory), counts_of_thread, bytes});
    } else {
      memory.release_context();
    }
    return {data, data, &CountingAllocator::release, c10::Device(c10::kCPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &CountingAllocator::release; }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

 private:
  static CountingAllocator*& instance() {
    static CountingAllocator* allocator = nullptr;
    return allocator;
  }
  static void release(void* data) { instance()->free(data); }

  void free(void* data) {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto found = blocks_.find(data);
    if (found == blocks_.end()) {
      lock.unlock();
      inner_->raw_deleter()(data);
      return;
    }
    const Block block = std::move(found->second);
    blocks_.erase(found);
    lock.unlock();
    block.counts->add(-block.bytes);
  }

  c10::Allocator* inner_;
  std::mutex mutex_;
  std::unordered_map<void*, Block> blocks_;  ///< those that are counted
};

/// Set before main(): threads that allocate meanwhile would race with an exchange of the allocator.
/// It must outlive the last tensor, so it lives forever.
[[maybe_unused]] const bool installed = [] {
  c10::SetCPUAllocator(new CountingAllocator(c10::GetCPUAllocator()), /*priority=*/1);
  return true;
}();

}  // namespace

MemoryCounter::MemoryCounter() : counts_(std::make_shared<Counts>()) { counts_of_thread = counts_; }

MemoryCounter::~MemoryCounter() { counts_of_thread = nullptr; }

int64_t MemoryCounter::bytes() const { return counts_->bytes; }
int64_t MemoryCounter::peak() const { return counts_->peak; }
void MemoryCounter::reset_peak() { counts_->peak = counts_->bytes.load(); }

}  // namespace lockstep::testing
