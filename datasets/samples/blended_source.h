#pragma once

#include <memory>
#include <vector>

#include "lockstep/datasets/blend.h"
#include "lockstep/datasets/sample_source.h"

namespace lockstep {

/// Samples of several sources, in Megatron Core's order of a blend.
class BlendedSource : public SampleSource {
 public:
  /// `weights`: from normalize_weights(), one for each source. The blend is endless if a source is.
  /// Otherwise it has as many samples as all sources together, or none if one of them is empty. A
  /// source that is drawn from more often than it has samples starts again, as Megatron Core's
  /// validation sets do.
  BlendedSource(std::vector<std::unique_ptr<SampleSource>> sources, std::vector<double> weights);

  int64_t size() const override { return size_; }
  void read(int64_t sample, std::span<int64_t> out) override;

 private:
  static constexpr int64_t kBlock = 1 << 16;  ///< number of samples that are drawn together

  void open_block(int64_t block);

  std::vector<std::unique_ptr<SampleSource>> sources_;
  std::vector<double> weights_;
  std::vector<std::vector<int64_t>> drawn_;  ///< before each block that was reached
  int64_t block_ = -1;
  std::vector<BlendedSample> samples_;  ///< of block_
  int64_t size_ = kEndless;
};

}  // namespace lockstep
