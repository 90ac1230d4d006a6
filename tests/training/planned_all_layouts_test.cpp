// Every layout of 1 to 16 ranks: the plan against real runs. `make test` draws some;
// LOCKSTEP_ALL_LAYOUTS=1 runs all of them. LOCKSTEP_RANDOM_SEED chooses the other options of a
// layout.

#include <gtest/gtest.h>

#include <cstdlib>
#include <iostream>
#include <random>

#include "lockstep/core/error.h"
#include "lockstep/tests/training/planned_runs.h"

namespace lockstep {
namespace {

using namespace testing;

struct RankLayout {
  int64_t world, tensor, pipeline, context;
  int64_t expert = 0, expert_tensor = 0;  ///< 0: a dense model

  int64_t data() const { return world / (tensor * pipeline * context); }
};

/// Layouts of models of 8 layers and 4 heads, without experts and with 4 of them.
std::vector<RankLayout> all_layouts() {
  std::vector<RankLayout> all;
  for (int64_t world = 1; world <= 16; ++world)
    for (const int64_t tensor : {1, 2, 4})
      for (const int64_t pipeline : {1, 2, 4, 8})
        for (const int64_t context : {1, 2, 4, 8}) {
          if (world % (tensor * pipeline * context) != 0) continue;
          all.push_back({world, tensor, pipeline, context});
          for (const int64_t expert : {1, 2, 4})
            for (const int64_t expert_tensor : {1, 2, 4}) {
              if (expert_tensor > tensor || world % (expert * expert_tensor * pipeline) != 0)
                continue;
              all.push_back({world, tensor, pipeline, context, expert, expert_tensor});
            }
        }
  return all;
}

class FieldDraw {
 public:
  explicit FieldDraw(uint64_t seed) : random_(seed) {}

  template <class T>
  T one_of(std::initializer_list<T> list) {
    return list.begin()[std::uniform_int_distribution<size_t>(0, list.size() - 1)(random_)];
  }
  bool chance() { return one_of({false, true}); }
  std::mt19937_64& engine() { return random_; }

 private:
  std::mt19937_64 random_;
};

Overrides fields_of(const RankLayout& at, FieldDraw& draw) {
  Overrides fields = {"model.num_layers=8", "train.device=cpu"};
  const auto add = [&](std::string_view name, const auto& value) {
    fields.push_back(fmt::format("{}={}", name, value));
  };
  add("train.global_batch_size", 4 * at.data());
  add("parallel.tensor_model_parallel_size", at.tensor);
  add("parallel.pipeline_model_parallel_size", at.pipeline);
  add("parallel.context_parallel_size", at.context);
  if (at.tensor > 1) add("parallel.sequence_parallel", at.expert > 0 || draw.chance());
  if (at.pipeline > 1 && at.pipeline < 8 && draw.chance())
    add("parallel.virtual_pipeline_model_parallel_size", 2);
  else if (at.pipeline > 1)
    add("parallel.pipeline_schedule", draw.one_of<const char*>({"1f1b", "gpipe", "zb-h1"}));
  if (at.context > 1)
    add("parallel.cp_comm_type", draw.one_of<const char*>({"p2p", "all_gather", "a2a"}));
  if (draw.chance()) {
    fields = with(fields, kSharded);
    add("ddp.data_parallel_sharding_strategy",
        draw.one_of<const char*>({"optim", "optim_grads", "optim_grads_params"}));
  }
  add("model.recompute_granularity", draw.one_of<const char*>({"none", "selective", "full"}));
  add("train.precision", draw.one_of<const char*>({"fp32", "bf16"}));
  if (at.expert == 0) return fields;
  fields = with(fields, kExperts);
  add("parallel.expert_model_parallel_size", at.expert);
  add("parallel.expert_tensor_parallel_size", at.expert_tensor);
  add("model.moe_token_dispatcher_type", draw.one_of<const char*>({"alltoall", "allgather"}));
  return fields;
}

/// Whether some of `fields` cannot be combined.
bool is_refused(int64_t world, const Overrides& fields) {
  try {
    record_job(config_of(fields), world);
    return false;
  } catch (const ConfigError&) {
    return true;
  }
}

TEST(PlannedJob, LayoutsUpToSixteenRanksCommunicateAsInARun) {
  constexpr size_t kSample = 6;
  constexpr int kTries = 20;
  const char* const given = std::getenv("LOCKSTEP_RANDOM_SEED");
  FieldDraw draw(given ? std::strtoull(given, nullptr, 10) : 1);
  std::vector<RankLayout> layouts = all_layouts();
  if (!std::getenv("LOCKSTEP_ALL_LAYOUTS")) {
    std::shuffle(layouts.begin(), layouts.end(), draw.engine());
    layouts.resize(kSample);
  }
  size_t refused = 0;
  for (const RankLayout& layout : layouts) {
    Overrides fields;
    int tries = 0;
    do fields = fields_of(layout, draw);
    while (is_refused(layout.world, fields) && ++tries < kTries);
    if (tries == kTries) {
      ++refused;
      std::cout << "refused: " << layout.world << " ranks, "
                << fmt::format("{}\n", fmt::join(fields, " "));
      continue;
    }
    expect_as_in_a_run(layout.world, fields);
  }
  std::cout << layouts.size() << " layouts, " << refused << " refused in any form\n";
  EXPECT_LT(refused, layouts.size() / 2);
}

}  // namespace
}  // namespace lockstep
