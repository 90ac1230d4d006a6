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
#include "lockstep/tests/support/device/device_streams.h"

namespace lockstep::testing {

constexpr int kPoison = 0xFF;

/// All memory of all devices, and the pinned memory. Freed blocks are kept for later allocations of
/// the same size, last in, first out. They are never given back.
class MemoryPool {
 public:
  static MemoryPool& instance();

  /// Null for 0 bytes. `stream`: a stream of the device; nullopt: pinned memory. In a capture the
  /// memory belongs to the graph: once freed, it can be allocated again only in the same capture.
  void* allocate(size_t bytes, const std::optional<c10::Stream>& stream);
  void free(void* pointer);
  void record_use(const void* pointer, const c10::Stream& stream);

  /// Called when the graph of that capture is destroyed: its memory becomes ordinary memory once
  /// `last_replay` is reached, if there was one.
  void release_graph(int64_t capture, const std::optional<DeviceEvent>& last_replay);

  /// Whether live device memory (`device`) or live pinned memory (nullopt) holds the pointer.
  bool holds_live(const void* pointer, std::optional<c10::DeviceIndex> device);
  std::optional<c10::DeviceIndex> device_of(const void* pointer);

  DeviceBytes bytes_of(c10::DeviceIndex device);
  void reset_peak(c10::DeviceIndex device);

 private:
  struct Block {
    char* data = nullptr;
    size_t bytes = 0;                   ///< rounded up
    std::optional<c10::Stream> stream;  ///< nullopt: pinned
    bool live = false;
    int64_t graph = 0;                    ///< id of its capture; 0: none
    std::vector<c10::Stream> users = {};  ///< recorded streams other than `stream`
  };
  /// Device (-1: pinned), stream, graph, bytes: a free block is reused only for the same kind.
  using Kind = std::tuple<int, c10::StreamId, int64_t, size_t>;

  static Kind kind_of(const Block& block);
  Block* find(const void* pointer);
  void add_live(const Block& block, int64_t sign);
  void reuse(Block* block);
  void reuse_in_capture(Block* block, int64_t graph);

  std::mutex mutex_;
  std::map<uintptr_t, Block> blocks_;
  std::map<Kind, std::vector<Block*>> free_;
  std::array<DeviceBytes, kMaxDevices> bytes_ = {};
};

}  // namespace lockstep::testing
