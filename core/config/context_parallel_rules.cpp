#include "lockstep/core/context_parallel_rules.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <sstream>

#include "lockstep/core/check.h"
#include "lockstep/core/integers.h"

namespace lockstep {
namespace {

constexpr std::array kCommunications = {ContextCommunication::p2p, ContextCommunication::all_gather,
                                        ContextCommunication::a2a, ContextCommunication::a2a_p2p};

/// The parts of `text` between commas, without leading blanks.
std::vector<std::string> split_at_commas(const std::string& text) {
  std::vector<std::string> parts;
  std::istringstream stream(text + ",");
  for (std::string part; std::getline(stream, part, ',');)
    parts.push_back(part.erase(0, part.find_first_not_of(' ')));
  return parts;
}

/// The entries of parallel.cp_comm_type_of_layers, one for each layer.
std::vector<ContextCommunication> listed_communications(const TransformerConfig& model,
                                                        const ParallelConfig& parallel) {
  const std::vector<std::string> parts = split_at_commas(*parallel.cp_comm_type_of_layers);
  std::vector<ContextCommunication> result;
  for (const std::string& part : parts)
    for (const ContextCommunication communication : kCommunications)
      if (part == to_string(communication)) result.push_back(communication);
  require<ConfigError>(
      result.size() == parts.size() && static_cast<int64_t>(parts.size()) == model.num_layers,
      "parallel.cp_comm_type_of_layers: found '{}', allowed: one of p2p, "
      "all_gather, a2a, a2a+p2p for each of the {} layers, separated by commas",
      *parallel.cp_comm_type_of_layers, model.num_layers);
  return result;
}

/// The number of ranks that exchange heads for sequence.
int64_t ranks_that_exchange_heads(const ParallelConfig& parallel,
                                  ContextCommunication communication) {
  if (communication == ContextCommunication::a2a) return parallel.context_parallel_size;
  if (communication != ContextCommunication::a2a_p2p) return 1;
  return context_parallel_levels(parallel)[0];
}

void check_heads(const TransformerConfig& model, const ParallelConfig& parallel,
                 const FieldNames& names, ContextCommunication communication) {
  const int64_t exchange = ranks_that_exchange_heads(parallel, communication);
  const int64_t groups =
      std::max<int64_t>(1, *model.num_query_groups / parallel.tensor_model_parallel_size);
  require<ConfigError>(groups % exchange == 0,
                       "{}: found {}, which leaves {} on a tensor-parallel rank, allowed with "
                       "parallel.cp_comm_type = {}: a multiple of the {} ranks that exchange heads",
                       names.num_query_groups, *model.num_query_groups, groups,
                       to_string(communication), exchange);
}

}  // namespace

std::vector<int64_t> context_parallel_levels(const ParallelConfig& parallel) {
  if (!parallel.hierarchical_context_parallel_sizes) return {};
  const std::string& text = *parallel.hierarchical_context_parallel_sizes;
  std::vector<int64_t> levels;
  bool good = true;
  for (const std::string& part : split_at_commas(text)) {
    int64_t level = 0;
    const auto [end, error] = std::from_chars(part.data(), part.data() + part.size(), level);
    good = good && error == std::errc() && end == part.data() + part.size() && level >= 1 &&
           parallel.context_parallel_size % level == 0;
    levels.push_back(level);
  }
  require<ConfigError>(
      good && levels.size() == 2 && levels[0] == parallel.context_parallel_size / levels[1],
      "parallel.hierarchical_context_parallel_sizes: found '{}', allowed: two "
      "integers >= 1, as in 2,4, whose product is parallel.context_parallel_size "
      "({})",
      text, parallel.context_parallel_size);
  return levels;
}

ContextCommunication context_communication(const TransformerConfig& model,
                                           const ParallelConfig& parallel, int64_t layer) {
  if (!parallel.cp_comm_type_of_layers) return parallel.cp_comm_type;
  return listed_communications(model, parallel).at(static_cast<size_t>(layer));
}

void check_context_parallel(const TransformerConfig& model, const ParallelConfig& parallel,
                            const FieldNames& names) {
  const std::vector<ContextCommunication> communications =
      parallel.cp_comm_type_of_layers ? listed_communications(model, parallel)
                                      : std::vector{parallel.cp_comm_type};
  const bool hierarchical = std::find(communications.begin(), communications.end(),
                                      ContextCommunication::a2a_p2p) != communications.end();
  require<ConfigError>(parallel.hierarchical_context_parallel_sizes.has_value() == hierarchical,
                       "parallel.hierarchical_context_parallel_sizes: {}",
                       hierarchical ? "not set; cp_comm_type = a2a+p2p needs it"
                                    : "set; only cp_comm_type = a2a+p2p uses it");
  if (hierarchical) context_parallel_levels(parallel);
  const int64_t ranks = parallel.context_parallel_size;
  if (ranks == 1) return;
  const int64_t chunks = checked_mul(2, ranks, "chunks of parallel.context_parallel_size");
  require<ConfigError>(model.seq_length % chunks == 0,
                       "model.seq_length: found {}, allowed: a multiple of 2 * "
                       "parallel.context_parallel_size ({})",
                       model.seq_length, chunks);
  require<ConfigError>(model.attention_dropout == 0,
                       "model.attention_dropout: found {}, allowed with "
                       "parallel.context_parallel_size > 1: 0",
                       model.attention_dropout);
  require<ConfigError>(parallel.pipeline_schedule != PipelineScheduleFamily::zb_h1,
                       "parallel.pipeline_schedule: found zb-h1, allowed with "
                       "parallel.context_parallel_size > 1: 1f1b or gpipe");
  for (const ContextCommunication communication : communications)
    check_heads(model, parallel, names, communication);
}

}  // namespace lockstep
