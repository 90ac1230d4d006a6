#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <utility>

#include <ATen/core/Tensor.h>

namespace lockstep {

/// Keys and values of the tokens that a model has read, layer by layer, so that it need not read
/// them again for the next ones: for text generation, without autograd. The caller creates it and
/// passes it to one forward() after another, each with the tokens that follow.
class KeyValueCache {
 public:
  /// For sequences of up to `capacity` tokens. A layer's memory is allocated when the layer first
  /// appends.
  explicit KeyValueCache(int64_t capacity) : capacity_(capacity) {}

  int64_t capacity() const { return capacity_; }
  /// Tokens of each sequence that all layers have read.
  int64_t length() const { return length_; }

  /// Adds `key` and `value` [sequence, batch, groups, channels] of the tokens length(), length() +
  /// 1, ... in layer `layer` of the model. Returns those of all tokens so far, views of the cache
  /// [length() + sequence, batch, groups, channels]. UsageError: more than the capacity, another
  /// batch.
  std::pair<at::Tensor, at::Tensor> append(int64_t layer, const at::Tensor& key,
                                           const at::Tensor& value);

  /// Notes that all layers have `tokens` more.
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
/// channels], `keys` and `values` [all, batch, groups, channels] of all tokens -> [new, batch,
/// heads * channels]. The heads of a group read its keys and values where they are. A token sees
/// `window` tokens, itself included, or all before it.
at::Tensor cached_attention(const at::Tensor& query, const at::Tensor& keys,
                            const at::Tensor& values, std::optional<int64_t> window = {});

}  // namespace lockstep
