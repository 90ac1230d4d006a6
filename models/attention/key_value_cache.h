#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <utility>

#include <ATen/core/Tensor.h>

namespace lockstep {

/// Keys and values of the tokens that a model has read, layer by layer, so that it need not read
/// them again for the next ones: for text generation, without autograd (at::NoGradGuard). The
/// caller creates it and passes it as TokenPositions::cache to one forward() after another, each
/// with the tokens that follow in all sequences of the batch. Each stage of a pipeline has its own.
///
/// - GPTModel gives the tokens their positions and calls advance(). It refuses by UsageError
///   positions or documents beside a cache, sequences that tp or cp cuts, and more tokens in all
///   than model.seq_length.
/// - A model of your own passes its layers the positions length(), length() + 1, ... and, once its
///   last layer has run, calls advance(). Its sequences must be whole; attention refuses documents.
///
/// If a forward() throws, length() stays, and the same tokens may be passed again.
class KeyValueCache {
 public:
  /// For sequences of up to `capacity` tokens. A layer's memory, 2 * capacity * batch * groups *
  /// channels elements, is allocated when the layer first appends, with the dtype and on the device
  /// of what it appends.
  explicit KeyValueCache(int64_t capacity) : capacity_(capacity) {}

  /// The most tokens that each sequence may have.
  int64_t capacity() const { return capacity_; }
  /// Tokens of each sequence that all layers have read.
  int64_t length() const { return length_; }

  /// Attention calls it. Adds `key` and `value` [sequence, batch, groups, channels] of the tokens
  /// length(), length() + 1, ... in layer `layer` of the model, `groups` being the key heads that
  /// this rank of tp has. Returns those of all tokens so far, views of the cache [length() +
  /// sequence, batch, groups, channels]. UsageError: more tokens than the capacity; a value unlike
  /// its key; a batch, groups, channels or a dtype unlike those before.
  std::pair<at::Tensor, at::Tensor> append(int64_t layer, const at::Tensor& key,
                                           const at::Tensor& value);

  /// Notes that all layers have appended `tokens` more.
  void advance(int64_t tokens) { length_ += tokens; }

 private:
  struct Layer {
    at::Tensor keys;  ///< [capacity, batch, groups, channels]
    at::Tensor values;
  };

  int64_t capacity_;
  int64_t length_ = 0;
  std::map<int64_t, Layer> layers_;
};

/// Causal attention of the last tokens of sequences to all of them: `query` [new, batch, heads,
/// channels], `keys` and `values` [all, batch, groups, channels] of all tokens, the last ones too,
/// as append() returns them; `groups` must divide `heads` -> [new, batch, heads * channels]. The
/// heads of a group read its keys and values where they are. A token sees `window` tokens, itself
/// included, or all before it.
at::Tensor cached_attention(const at::Tensor& query, const at::Tensor& keys,
                            const at::Tensor& values, std::optional<int64_t> window = {});

}  // namespace lockstep
