#pragma once

// Internal.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "lockstep/checkpoint/manifest.h"

namespace lockstep {

/// The bytes of a file of a checkpoint, on disk or in memory.
class CheckpointFileBytes {
 public:
  CheckpointFileBytes() = default;
  virtual ~CheckpointFileBytes() = default;
  CheckpointFileBytes(const CheckpointFileBytes&) = delete;
  CheckpointFileBytes& operator=(const CheckpointFileBytes&) = delete;

  /// Its name in messages.
  virtual const std::string& path() const = 0;
  virtual int64_t size() const = 0;
  /// Reads all `count` bytes from `offset` on. FileError.
  virtual void read_at(int64_t offset, char* to, size_t count) const = 0;
};

/// A checkpoint whose files are in memory. They hold tensors without a safetensors header.
struct CheckpointSource {
  std::string name;  ///< in messages, in place of a path
  Manifest manifest;
  std::function<std::unique_ptr<CheckpointFileBytes>(const ManifestFile&)> open;
};

}  // namespace lockstep
