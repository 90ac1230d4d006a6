#pragma once

// Internal.

#include <cstddef>
#include <utility>
#include <vector>

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

namespace lockstep {

/// Memory of one device that passes from one piece of a model to the next, so that no step asks the
/// allocator for it. A block that is given back may be taken again at once: on an asynchronous
/// device, everything that uses it must run on one stream, or wait for that stream first, as
/// collectives do.
class BlockPool {
 public:
  explicit BlockPool(c10::Device device) : device_(device) {}
  BlockPool(const BlockPool&) = delete;
  BlockPool& operator=(const BlockPool&) = delete;

  /// At least `bytes`, with undefined contents: the smallest free block that is at most a quarter
  /// larger. If there is none, free blocks are returned to the allocator first. c10::Error: no
  /// memory.
  c10::DataPtr take(size_t bytes);
  /// Takes back what take() gave.
  void give(c10::DataPtr block);
  /// Returns free blocks to the allocator.
  void trim();
  /// Gives up a taken block, which belongs to somebody else from now on.
  void lose(const void* block);

  /// Bytes that are taken or free, now and at the peak so far.
  size_t bytes() const { return bytes_; }
  size_t peak_bytes() const { return peak_; }

 private:
  struct Block {
    c10::DataPtr data;
    size_t bytes;
  };

  c10::Device device_;
  std::vector<Block> free_;
  std::vector<std::pair<void*, size_t>> taken_;
  size_t bytes_ = 0, peak_ = 0;
};

}  // namespace lockstep
