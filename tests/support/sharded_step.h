#pragma once

#include <map>
#include <ostream>
#include <string>

#include "lockstep/distributed/distributed_data_parallel.h"
#include "lockstep/distributed/param_and_grad_buffer.h"
#include "lockstep/training/trainer.h"

/// What docs/library.md states about a step with sharded parameters (optim_grads_params).
namespace lockstep::testing {

/// Calls and input bytes of one rank: all-gathers of parameters, reduce-scatters of gradients.
struct ShardedTraffic {
  int64_t gathers = 0, gathered = 0, reductions = 0, reduced = 0;
  bool operator==(const ShardedTraffic&) const = default;
};

inline void PrintTo(const ShardedTraffic& traffic, std::ostream* out) {
  *out << traffic.gathers << " gathers of " << traffic.gathered << " bytes, " << traffic.reductions
       << " reductions of " << traffic.reduced;
}

/// Bytes of this rank's shards of the parameters of each unit, and of the experts of each, by the
/// name of the first parameter.
inline std::map<std::string, int64_t> shard_bytes(const Trainer& trainer) {
  std::map<std::string, int64_t> units;
  for (const ParamAndGradBuffer* buffer : trainer.training_model().wrappers().front()->buffers())
    units[buffer->params().front().name] = buffer->kept_param_bytes();
  return units;
}

inline bool is_of_experts(const std::string& name) {
  return name.find(".experts.") != std::string::npos;
}

/// Traffic of the experts, or of the rest, in a step of a model without pipeline and with an untied
/// output layer. Each micro-batch gathers a unit twice. Two units are gathered once: the embedding
/// table, which backward does not read, and the last unit of forward, with which backward begins.
/// With `ahead`, two more units are still gathered: the unit before the last one for backward, and
/// the first layer for the next micro-batch. `ranks` share a unit; a gradient has `widening` times
/// the bytes of its parameter.
inline ShardedTraffic expected_traffic(const std::map<std::string, int64_t>& units, bool experts,
                                       int64_t microbatches, int64_t ranks, int64_t widening = 1,
                                       bool ahead = false) {
  ShardedTraffic traffic;
  for (const auto& [name, bytes] : units) {
    if (is_of_experts(name) != experts) continue;
    const bool once = name == "embedding.word_embeddings.weight" ||
                      name.starts_with("output_layer.") ||
                      (ahead && name.starts_with("decoder.final_layernorm."));
    int64_t gathers = (once ? 1 : 2) * microbatches;
    if (ahead && name.starts_with("decoder.layers.0.")) gathers -= microbatches - 1;
    traffic.gathers += gathers;
    traffic.gathered += gathers * bytes;
    ++traffic.reductions;
    traffic.reduced += ranks * widening * bytes;
  }
  return traffic;
}

}  // namespace lockstep::testing
