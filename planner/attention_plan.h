#pragma once

// Internal.

#include <cstdint>

#include "lockstep/core/config.h"
#include "lockstep/core/integers.h"
#include "lockstep/planner/stage_shapes.h"

namespace lockstep {

/// UsageError if the result does not fit into 64 bits.
namespace activation_bytes {

template <class... Factors>
int64_t product(Factors... factors) {
  int64_t result = 1;
  ((result = checked_mul(result, factors, "bytes of activations")), ...);
  return result;
}

template <class... Terms>
int64_t sum(Terms... terms) {
  int64_t result = 0;
  ((result = checked_add(result, terms, "bytes of activations")), ...);
  return result;
}

}  // namespace activation_bytes

/// The sizes of activation_plan.h.
struct ActivationSizes {
  explicit ActivationSizes(const Config& config);

  LocalWidths widths;
  int64_t sequence;
  int64_t batch;
  int64_t tokens;
  int64_t own_tokens;  ///< between the tensor-parallel regions
  int64_t element;     ///< bytes
  int64_t wide;
};

/// The bytes of attention in activation_plan.h. `number` is that of a layer in the whole model.
class AttentionPlan {
 public:
  /// `config` must outlive it.
  AttentionPlan(const Config& config, const ActivationSizes& sizes);

  int64_t layer(int64_t number) const;
  /// The part that backward computes again with selective recomputation.
  int64_t core(int64_t number) const;
  /// The positions of the tokens, which all layers of `chunk` share.
  int64_t positions(const ModelChunk& chunk) const;

  /// Bytes of the queries, and of the keys, of all heads of a rank.
  int64_t query_bytes() const;
  int64_t key_bytes() const;

 private:
  /// How context parallelism brings queries and keys together.
  struct Transport {
    int64_t gathered = 1;    ///< ranks whose keys and values a rank keeps
    bool exchanges = false;  ///< heads for sequence
  };

  bool drops() const { return config_.attention_dropout > 0; }
  bool is_cut() const { return parallel_.context_parallel_size > 1; }
  bool recomputes() const;
  Transport transport(int64_t number) const;
  int64_t context(int64_t number, int64_t queries, int64_t query, int64_t key) const;
  int64_t weights() const;
  bool queries_are_views() const;
  int64_t query_key_norms() const;
  int64_t self_attention(int64_t number) const;
  int64_t latents(int64_t rank) const;
  int64_t head_bytes() const;
  bool has_two_widths() const;
  int64_t latent_attention(int64_t number) const;

  const TransformerConfig& config_;
  const ParallelConfig& parallel_;
  ActivationSizes sizes_;
  bool bounded_;  ///< attention ends inside sequences
  bool on_cuda_;
};

}  // namespace lockstep
