#pragma once

#include <string>

#include "lockstep/datasets/document_list.h"
#include "lockstep/datasets/index_cache.h"
#include "lockstep/datasets/sample_source.h"

namespace lockstep {

/// Where the indices of a DocumentSource are kept.
struct IndexCacheOptions {
  std::string folder;
  bool required = false;  ///< as in IndexCacheFile
};

/// Documents in Megatron Core's order. Each epoch is the one-epoch index of its GPTDataset
/// (build_sample_index() with num_samples = 0): the first with the low 32 bits of `seed`, the next
/// with that plus one, and so on. So a run within one epoch reads what Megatron reads. Beyond that,
/// Megatron's order would change with the length of the run, and a run that is extended would lose
/// samples and repeat others.
///
/// The indices of the first epoch, and of large later ones, are kept on disk.
class DocumentSource : public SampleSource {
 public:
  /// ConfigError if the documents have fewer than seq_length + 1 tokens.
  DocumentSource(DocumentList documents, int64_t seq_length, uint64_t seed,
                 IndexCacheOptions cache);

  void read(int64_t sample, std::span<int64_t> out) override;

  int64_t samples_per_epoch() const { return samples_per_epoch_; }

 private:
  void open_epoch(int64_t epoch);
  SampleIndex build(int64_t epoch) const;
  [[noreturn]] void fail_by_index(int64_t sample) const;

  DocumentList documents_;
  int64_t seq_length_;
  uint64_t seed_;
  IndexCacheOptions cache_;
  std::string description_;
  int64_t samples_per_epoch_;
  int64_t epoch_ = -1;
  SampleIndexView index_;
};

}  // namespace lockstep
