#include "lockstep/distributed/block_pool.h"

#include <algorithm>

#include <ATen/ATen.h>

#include "lockstep/core/flat_tensor.h"

namespace lockstep {

c10::DataPtr BlockPool::take(size_t bytes) {
  auto best = free_.end();
  for (auto block = free_.begin(); block != free_.end(); ++block)
    if (block->bytes >= bytes && block->bytes <= bytes + bytes / 4 &&
        (best == free_.end() || block->bytes < best->bytes))
      best = block;
  if (best == free_.end()) {
    trim();
    const at::Tensor fresh =
        flat_zeros(static_cast<int64_t>(bytes), at::TensorOptions(at::kByte).device(device_));
    c10::DataPtr data =
        fresh.storage().unsafeGetStorageImpl()->set_data_ptr(c10::DataPtr(nullptr, fresh.device()));
    bytes_ += bytes;
    peak_ = std::max(peak_, bytes_);
    taken_.emplace_back(data.get(), bytes);
    return data;
  }
  Block block = std::move(*best);
  free_.erase(best);
  taken_.emplace_back(block.data.get(), block.bytes);
  return std::move(block.data);
}

void BlockPool::give(c10::DataPtr block) {
  const auto taken = std::find_if(taken_.begin(), taken_.end(),
                                  [&](const auto& one) { return one.first == block.get(); });
  free_.push_back({std::move(block), taken->second});
  taken_.erase(taken);
}

void BlockPool::trim() {
  for (const Block& block : free_) bytes_ -= block.bytes;
  free_.clear();
}

void BlockPool::lose(const void* block) {
  const auto taken = std::find_if(taken_.begin(), taken_.end(),
                                  [&](const auto& one) { return one.first == block; });
  bytes_ -= taken->second;
  taken_.erase(taken);
}

}  // namespace lockstep
