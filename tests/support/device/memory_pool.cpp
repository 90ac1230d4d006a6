#include "lockstep/tests/support/device/memory_pool.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

#include "lockstep/tests/support/device/graph_capture.h"

namespace lockstep::testing {
namespace {

constexpr size_t kAlignment = 64;  // the CPU allocator's, which decides how kernels vectorize

size_t rounded(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

int64_t capture_id(const std::optional<c10::Stream>& stream) {
  const auto capture = stream ? GraphCapture::of(*stream) : nullptr;
  return capture ? capture->id() : 0;
}

}  // namespace

MemoryPool& MemoryPool::instance() {
  static auto* const pool = new MemoryPool;  // tensors may be freed while the process ends
  return *pool;
}

MemoryPool::Kind MemoryPool::kind_of(const Block& block) {
  const auto& stream = block.stream;
  return stream ? Kind{stream->device_index(), stream->id(), block.graph, block.bytes}
                : Kind{-1, 0, 0, block.bytes};
}

void MemoryPool::add_live(const Block& block, int64_t sign) {
  if (!block.stream) return;
  DeviceBytes& bytes = bytes_[static_cast<size_t>(block.stream->device_index())];
  bytes.live += sign * static_cast<int64_t>(block.bytes);
  bytes.peak = std::max(bytes.peak, bytes.live);
}

void* MemoryPool::allocate(size_t bytes, const std::optional<c10::Stream>& stream) {
  if (bytes == 0) return nullptr;
  const size_t size = rounded(bytes);
  const Block wanted{.bytes = size, .stream = stream, .graph = capture_id(stream)};
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Block*>& kept = free_[kind_of(wanted)];
  Block* block = nullptr;
  if (!kept.empty()) {
    block = kept.back();
    kept.pop_back();
  } else {
    auto* const data = static_cast<char*>(std::aligned_alloc(kAlignment, size));
    if (!data) throw std::bad_alloc();
    std::memset(data, kPoison, size);
    block = &blocks_[reinterpret_cast<uintptr_t>(data)];
    *block = wanted;
    block->data = data;
  }
  block->live = true;
  add_live(*block, 1);
  return block->data;
}

void MemoryPool::free(void* pointer) {
  if (!pointer) return;
  Block* block = nullptr;
  std::vector<c10::Stream> users;
  int64_t graph = 0;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    block = find(pointer);
    block->live = false;
    add_live(*block, -1);
    users.swap(block->users);
    graph = block->graph;
  }
  if (graph != 0 && users.empty()) return reuse_in_capture(block, graph);
  if (graph != 0) return;  // CUDA's allocator checks the users after the capture
  if (users.empty()) return reuse(block);
  const auto left = std::make_shared<std::atomic<size_t>>(users.size());
  for (const c10::Stream& user : users)
    enqueue_bookkeeping(user, [this, block, left] {
      if (--*left == 0) reuse(block);
    });
}

// The poison is queued before the block can be handed out, so it comes before the work that the
// next owner queues on the same stream.
void MemoryPool::reuse(Block* block) {
  if (block->stream)
    enqueue_bookkeeping(*block->stream,
                        [block] { std::memset(block->data, kPoison, block->bytes); });
  else
    std::memset(block->data, kPoison, block->bytes);
  const std::lock_guard<std::mutex> lock(mutex_);
  free_[kind_of(*block)].push_back(block);
}

// After the capture, only the graph owns the block.
void MemoryPool::reuse_in_capture(Block* block, int64_t graph) {
  const auto capture = GraphCapture::of(*block->stream);
  if (!capture || capture->id() != graph) return;
  capture->record_bookkeeping(*block->stream, [block](const c10::Stream& stream) {
    enqueue_bookkeeping(stream, [block] { std::memset(block->data, kPoison, block->bytes); });
  });
  const std::lock_guard<std::mutex> lock(mutex_);
  free_[kind_of(*block)].push_back(block);
}

void MemoryPool::release_graph(int64_t capture, const std::optional<DeviceEvent>& last_replay) {
  std::vector<Block*> free_blocks;
  std::vector<c10::Stream> streams;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto& [address, block] : blocks_) {
      if (block.graph != capture) continue;
      free_.erase(kind_of(block));
      block.graph = 0;
      if (!block.live) free_blocks.push_back(&block);
      if (std::find(streams.begin(), streams.end(), *block.stream) == streams.end())
        streams.push_back(*block.stream);
    }
  }
  for (const c10::Stream& stream : streams)
    if (last_replay) last_replay->block_uncaptured(stream);
  for (Block* const block : free_blocks) reuse(block);
}

MemoryPool::Block* MemoryPool::find(const void* pointer) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  auto after = blocks_.upper_bound(address);
  if (after == blocks_.begin()) return nullptr;
  Block& block = std::prev(after)->second;
  return address < reinterpret_cast<uintptr_t>(block.data) + block.bytes ? &block : nullptr;
}

void MemoryPool::record_use(const void* pointer, const c10::Stream& stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Block* const block = find(pointer);
  if (!block || !block->live || block->stream == stream) return;
  if (std::find(block->users.begin(), block->users.end(), stream) == block->users.end())
    block->users.push_back(stream);
}

bool MemoryPool::holds_live(const void* pointer, std::optional<c10::DeviceIndex> device) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const Block* const block = find(pointer);
  if (!block || !block->live) return false;
  return device ? block->stream && block->stream->device_index() == *device : !block->stream;
}

std::optional<c10::DeviceIndex> MemoryPool::device_of(const void* pointer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const Block* const block = find(pointer);
  if (!block || !block->stream) return std::nullopt;
  return block->stream->device_index();
}

DeviceBytes MemoryPool::bytes_of(c10::DeviceIndex device) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return bytes_.at(static_cast<size_t>(device));
}

void MemoryPool::reset_peak(c10::DeviceIndex device) {
  const std::lock_guard<std::mutex> lock(mutex_);
  DeviceBytes& bytes = bytes_.at(static_cast<size_t>(device));
  bytes.peak = bytes.live;
}

}  // namespace lockstep::testing
