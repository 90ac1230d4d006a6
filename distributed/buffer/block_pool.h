#pragma once

// Internal.

#include <cstddef>
#include <utility>
#include <vector>

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

namespace lockstep {

/// Memory of one device that goes from one piece of a model to the next, so that no step asks the
/// allocator for it. A block that is given back may be taken at once: on an asynchronous device all
/// that uses it must be of one stream, or wait for that stream first, as collectives do.
class BlockPool {
 public:
  explicit BlockPool(c10::Device device) : device_(device) {}
  BlockPool(const BlockPool&) = delete;
  BlockPool& operator=(const BlockPool&) = delete;

  /// At least `bytes` of any content: the smallest free block that is at most a quarter larger.
  /// Where there is none, free blocks go back to the allocator first. c10::Error: no memory.
  c10::DataPtr take(size_t bytes);
  /// Takes back what take() gave.
  void give(c10::DataPtr block);
  /// Free blocks go back to the allocator.
  void trim();
  /// Such a block belongs to somebody else from now on.
  void lose(const void* block);

  /// Bytes that are taken or free, now and at most so far.
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
