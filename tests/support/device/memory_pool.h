#pragma once

// Internal.

#include <array>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <tuple>
#include <vector>

#include <c10/core/Stream.h>

#include "lockstep/tests/support/device/device_memory.h"
#include "lockstep/tests/support/device/device_state.h"

namespace lockstep::testing {

constexpr int kPoison = 0xFF;

/// All memory of all devices, and the pinned memory. What is freed is kept for the next allocation
/// of the same size, the last freed first, and never given back.
class MemoryPool {
 public:
  static MemoryPool& instance();

  /// Null for 0 bytes. `stream`: of the device; nothing: pinned memory.
  void* allocate(size_t bytes, const std::optional<c10::Stream>& stream);
  void free(void* pointer);
  void record_use(const void* pointer, const c10::Stream& stream);

  /// Whether live device memory (`device`) or live pinned memory (nothing) holds the pointer.
  bool holds_live(const void* pointer, std::optional<c10::DeviceIndex> device);
  std::optional<c10::DeviceIndex> device_of(const void* pointer);

  DeviceBytes bytes_of(c10::DeviceIndex device);
  void reset_peak(c10::DeviceIndex device);

 private:
  struct Block {
    char* data = nullptr;
    size_t bytes = 0;                   ///< as rounded
    std::optional<c10::Stream> stream;  ///< nothing: pinned
    bool live = false;
    std::vector<c10::Stream> users = {};  ///< recorded, apart from `stream`
  };
  /// Device (-1: pinned), stream, bytes: what a free block may become.
  using Kind = std::tuple<int, c10::StreamId, size_t>;

  static Kind kind_of(const std::optional<c10::Stream>& stream, size_t bytes);
  Block* find(const void* pointer);
  void add_live(const Block& block, int64_t sign);
  void reuse(Block* block);

  std::mutex mutex_;
  std::map<uintptr_t, Block> blocks_;
  std::map<Kind, std::vector<Block*>> free_;
  std::array<DeviceBytes, kMaxDevices> bytes_ = {};
};

}  // namespace lockstep::testing
