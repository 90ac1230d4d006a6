#include "lockstep/datasets/blended_source.h"

#include <algorithm>
#include <utility>

#include "lockstep/core/check.h"

namespace lockstep {

BlendedSource::BlendedSource(std::vector<std::unique_ptr<SampleSource>> sources,
                             std::vector<double> weights)
    : sources_(std::move(sources)), weights_(std::move(weights)), drawn_(1) {
  drawn_[0].resize(sources_.size());
  const auto has_size = [](int64_t size) {
    return [size](const auto& source) { return source->size() == size; };
  };
  if (std::any_of(sources_.begin(), sources_.end(), has_size(kEndless))) return;
  size_ = 0;
  if (std::any_of(sources_.begin(), sources_.end(), has_size(0))) return;
  for (const auto& source : sources_) size_ += source->size();
}

void BlendedSource::open_block(int64_t block) {
  if (block == block_) return;
  for (auto reached = static_cast<int64_t>(drawn_.size()) - 1; reached < block; ++reached) {
    drawn_.push_back(drawn_.back());
    continue_blend(weights_, drawn_.back(), kBlock);
  }
  std::vector<int64_t> drawn = drawn_[static_cast<size_t>(block)];
  samples_ = continue_blend(weights_, drawn, kBlock);
  if (block + 1 == static_cast<int64_t>(drawn_.size())) drawn_.push_back(std::move(drawn));
  block_ = block;
}

void BlendedSource::read(int64_t sample, std::span<int64_t> out) {
  require<UsageError>(sample >= 0 && sample < size_, "blend: sample {}, allowed: 0 to {}", sample,
                      size_ - 1);
  open_block(sample / kBlock);
  const BlendedSample at = samples_[static_cast<size_t>(sample % kBlock)];
  SampleSource& source = *sources_[static_cast<size_t>(at.dataset)];
  source.read(at.sample % source.size(), out);
}

}  // namespace lockstep
