#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "lockstep/core/config.h"
#include "lockstep/datasets/sample_source.h"

namespace lockstep {

/// How the ends of documents affect a sample, as in Megatron Core's GPTDataset.
struct DocumentRules {
  int64_t end_of_document = 0;        ///< id
  bool reset_position_ids = false;    ///< positions begin at 0 after each end
  bool reset_attention_mask = false;  ///< attention does not cross an end
  bool eod_mask_loss = false;         ///< the token after an end is not to be predicted from it
};

/// The marks of a sample `ids` [seq_length + 1]. A document extends to its end-of-document token,
/// which belongs to it; the last document may lack its end.
SampleMarks mark_documents(std::span<const int64_t> ids, const DocumentRules& rules);

/// The samples of a source, with the marks of their documents.
class MarkedSource : public SampleSource {
 public:
  MarkedSource(std::unique_ptr<SampleSource> source, DocumentRules rules)
      : source_(std::move(source)), rules_(rules) {}

  int64_t size() const override { return source_->size(); }
  void read(int64_t sample, std::span<int64_t> out) override { source_->read(sample, out); }
  SampleMarks marks(int64_t /*sample*/, std::span<const int64_t> ids) override {
    return mark_documents(ids, rules_);
  }

 private:
  std::unique_ptr<SampleSource> source_;
  DocumentRules rules_;
};

/// The position of each token in its document; `lengths` must add up to `seq_length`.
std::vector<int64_t> positions_in_documents(std::span<const int64_t> lengths, int64_t seq_length);

/// Whether data.reset_position_ids, data.reset_attention_mask or data.eod_mask_loss is set.
bool marks_documents(const DataConfig& config);

/// Wraps the sources if marks_documents(). The end of a document is that of data.tokenizer.
/// ConfigError if that is not below `vocabulary_size`. Notes say if none of the first documents of
/// a data set ends so, and whether they have ids that the tokenizer lacks; and which text file has
/// no such end. A document consists of the sequences between two bounds of the .idx. Errors also as
/// for make_tokenizer() and IndexedDataset.
SampleSources with_document_marks(SampleSources sources, const DataConfig& config,
                                  int64_t vocabulary_size);

}  // namespace lockstep
