#include "lockstep/tests/support/memory_counter.h"

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

/// One allocation that counts.
struct Block {
  c10::DataPtr memory;
  std::shared_ptr<MemoryCounter::Counts> counts;
  int64_t bytes;

  static void release(void* block) {
    auto* const own = static_cast<Block*>(block);
    own->counts->add(-own->bytes);
    delete own;
  }
};

class CountingAllocator final : public c10::Allocator {
 public:
  explicit CountingAllocator(c10::Allocator* inner) : inner_(inner) {}

  c10::DataPtr allocate(size_t bytes) override {
    c10::DataPtr memory = inner_->allocate(bytes);
    if (!counts_of_thread) return memory;
    void* const data = memory.get();
    auto* const block = new Block{std::move(memory), counts_of_thread, static_cast<int64_t>(bytes)};
    block->counts->add(block->bytes);
    return {data, block, &Block::release, c10::Device(c10::kCPU)};
  }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

 private:
  c10::Allocator* inner_;
};

void install() {
  static const bool installed = [] {
    // Lives as long as the last tensor, so for ever.
    c10::SetCPUAllocator(new CountingAllocator(c10::GetCPUAllocator()), /*priority=*/1);
    return true;
  }();
  (void)installed;
}

}  // namespace

MemoryCounter::MemoryCounter() : counts_(std::make_shared<Counts>()) {
  install();
  counts_of_thread = counts_;
}

MemoryCounter::~MemoryCounter() { counts_of_thread = nullptr; }

int64_t MemoryCounter::bytes() const { return counts_->bytes; }
int64_t MemoryCounter::peak() const { return counts_->peak; }
void MemoryCounter::reset_peak() { counts_->peak = counts_->bytes.load(); }

}  // namespace lockstep::testing
