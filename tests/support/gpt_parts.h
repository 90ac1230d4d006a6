#pragma once

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include "lockstep/core/config.h"
#include "lockstep/core/parameters.h"
#include "lockstep/parallel_state/collectives.h"
#include "lockstep/tests/support/rank_threads.h"

/// A small GPT for tests of layouts, and functions that reassemble the parts of its ranks.
namespace lockstep::testing {

/// Its weights are large enough for every term to show.
inline TransformerConfig small_gpt() {
  TransformerConfig config;
  config.num_layers = 2;
  config.hidden_size = 16;
  config.num_attention_heads = 4;
  config.ffn_hidden_size = 24;
  config.seq_length = 8;
  config.vocab_size = 11;
  config.init_method_std = 0.4;
  return config;
}

/// How a model is cut.
struct Layout {
  int64_t tensor = 1;
  bool sequence = false;
  int64_t data = 1;

  ParallelConfig parallel() const {
    ParallelConfig config;
    config.tensor_model_parallel_size = tensor;
    config.sequence_parallel = sequence;
    return config;
  }
  RankThreadOptions threads(CollectiveLog* log = nullptr) const {
    RankThreadOptions options;
    options.sizes.tensor = tensor;
    options.log = log;
    return options;
  }
  std::string text() const {
    return "tp " + std::to_string(tensor) + (sequence ? " sp" : "") + " dp " + std::to_string(data);
  }
};

/// [samples, seq_length + 1] token ids from the vocabulary.
inline at::Tensor sample_ids(const TransformerConfig& config, int64_t samples) {
  const at::Tensor i = at::arange(samples * (config.seq_length + 1));
  return (i * i + 3 * i).remainder(config.vocab_size).view({samples, config.seq_length + 1});
}

/// The whole parameter, or its gradient, of which this rank holds `part`: joins the parts of the tp
/// ranks and removes padding. Collective over tp.
inline at::Tensor join_parts(const ParamDescription& description, const at::Tensor& part,
                             const ProcessGroup& tp) {
  at::Tensor whole = part.detach();
  const Placement placement = description.placement(MeshAxis::tp);
  if (const auto* shard = std::get_if<Shard>(&placement); shard != nullptr && tp.size() > 1) {
    std::vector<int64_t> shape = part.sizes().vec();
    shape.insert(shape.begin(), tp.size());
    const at::Tensor parts = at::empty(shape, part.options());
    all_gather(tp, parts, whole.contiguous(), "parts").wait();
    whole = at::cat(parts.unbind(0), shard->dim);
  }
  return description.unpadded_rows ? whole.narrow(0, 0, *description.unpadded_rows) : whole;
}

/// The largest difference, relative to the largest element of `expected` if that exceeds 1.
inline double difference(const at::Tensor& found, const at::Tensor& expected) {
  if (found.sizes() != expected.sizes()) return 1e300;
  const double largest = expected.abs().max().item<double>();
  return (found - expected).abs().max().item<double>() / std::max(1.0, largest);
}

using NamedTensors = std::map<std::string, at::Tensor>;

/// The largest difference over all tensors; 1e300 if the names differ, NaN if a difference is.
inline double difference(const NamedTensors& found, const NamedTensors& expected) {
  double largest = found.size() == expected.size() ? 0 : 1e300;
  for (const auto& [name, tensor] : expected) {
    const double apart = found.contains(name) ? difference(found.at(name), tensor) : 1e300;
    if (std::isnan(apart)) return apart;
    largest = std::max(largest, apart);
  }
  return largest;
}

}  // namespace lockstep::testing
