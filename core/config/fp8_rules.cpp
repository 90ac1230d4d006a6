#include "lockstep/core/fp8_rules.h"

#include <algorithm>

#include "lockstep/core/check.h"
#include "lockstep/core/integers.h"

namespace lockstep {
namespace {

constexpr int64_t kMultiple = 16;

/// Refuses fields that differ from their defaults.
class Unused {
 public:
  explicit Unused(const char* remedy) : remedy_(remedy) {}

  template <class Value, class Found>
  void check(const char* field, const Value& value, const Value& unused, const Found& found) const {
    require<ConfigError>(value == unused, "train.{}: found {}, but {}", field, found, remedy_);
  }

 private:
  const char* remedy_;
};

void check_delayed_fields(const TrainConfig& train, const char* remedy) {
  const TrainConfig defaults;
  const Unused unused(remedy);
  unused.check("fp8_amax_history_len", train.fp8_amax_history_len, defaults.fp8_amax_history_len,
               train.fp8_amax_history_len);
  unused.check("fp8_amax_compute_algo", train.fp8_amax_compute_algo, defaults.fp8_amax_compute_algo,
               to_string(train.fp8_amax_compute_algo));
  unused.check("fp8_margin", train.fp8_margin, defaults.fp8_margin, train.fp8_margin);
}

void check_fields_without_fp8(const TrainConfig& train) {
  constexpr char kRemedy[] = "train.fp8 is none; it needs train.fp8 = hybrid or e4m3";
  const TrainConfig defaults;
  const Unused unused(kRemedy);
  unused.check("fp8_recipe", train.fp8_recipe, defaults.fp8_recipe, to_string(train.fp8_recipe));
  check_delayed_fields(train, kRemedy);
  unused.check("num_layers_at_start_in_bf16", train.num_layers_at_start_in_bf16, int64_t{0},
               train.num_layers_at_start_in_bf16);
  unused.check("num_layers_at_end_in_bf16", train.num_layers_at_end_in_bf16, int64_t{0},
               train.num_layers_at_end_in_bf16);
}

/// Refuses more than `most` layers without fp8; `relation` is that of their number to num_layers.
void check_layers(const Config& config, int64_t most, const char* relation) {
  const int64_t start = config.train.num_layers_at_start_in_bf16;
  const int64_t end = config.train.num_layers_at_end_in_bf16;
  require<ConfigError>(start <= most && end <= most - start,
                       "train.num_layers_at_{}_in_bf16: found {}, and {} at the {}; allowed: "
                       "together {} model.num_layers ({})",
                       start > most ? "start" : "end", start > most ? start : end,
                       start > most ? end : start, start > most ? "end" : "start", relation,
                       config.model.num_layers);
}

/// The number of tokens is a dimension of the products for the gradients of weights.
void check_tokens(const Config& config) {
  const ParallelConfig& parallel = config.parallel;
  const int64_t ranks = std::max<int64_t>(1, parallel.context_parallel_size);
  const int64_t tokens = config.model.seq_length / ranks;
  require<ConfigError>(tokens % kMultiple == 0,
                       "model.seq_length: found {}{}, allowed with train.fp8: multiples of {}",
                       config.model.seq_length,
                       ranks == 1 ? "" : fmt::format(", {} tokens on each rank of cp", tokens),
                       kMultiple);
  if (!config.model.multi_latent_attention || !parallel.sequence_parallel) return;
  const int64_t own = checked_mul(tokens / parallel.tensor_model_parallel_size,
                                  config.train.micro_batch_size, "train.micro_batch_size");
  require<ConfigError>(own % kMultiple == 0,
                       "model.seq_length: found {}, so that a rank of tp has {} tokens of a "
                       "micro-batch, allowed with train.fp8, model.multi_latent_attention and "
                       "parallel.sequence_parallel: multiples of {}",
                       config.model.seq_length, own, kMultiple);
}

}  // namespace

void check_fp8(const Config& config) {
  const TrainConfig& train = config.train;
  if (train.fp8 == Fp8Format::none) return check_fields_without_fp8(train);
  const char* const format = to_string(train.fp8);
  require<ConfigError>(train.precision == Precision::bf16 || train.precision == Precision::fp32,
                       "train.fp8: found {}, allowed with train.precision = {}: none; it needs "
                       "precision = bf16 or fp32",
                       format, to_string(train.precision));
  require<ConfigError>(train.cuda_graph == CudaGraph::none,
                       "train.fp8: found {}, allowed with train.cuda_graph = {}: none", format,
                       to_string(train.cuda_graph));
  require<ConfigError>(train.fp8_recipe != Fp8Recipe::rowwise || train.fp8 == Fp8Format::e4m3,
                       "train.fp8_recipe: found rowwise, allowed with train.fp8 = hybrid: delayed, "
                       "tensorwise; rowwise needs fp8 = e4m3");
  if (train.fp8_recipe != Fp8Recipe::delayed)
    check_delayed_fields(train,
                         "train.fp8_recipe is not delayed; it needs train.fp8_recipe = delayed");
  check_tokens(config);
  check_layers(config, config.model.num_layers, "at most");
}

void check_fp8_in_use(const Config& config) {
  if (config.train.fp8 != Fp8Format::none)
    check_layers(config, config.model.num_layers - 1, "less than");
}

}  // namespace lockstep
