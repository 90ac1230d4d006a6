// The reference GPT trains the same on every layout of its parallel dimensions: loss and gradient
// norm of ten steps, the validation loss and all final weights, to 1e-12 in double and 2e-5 in
// single precision.
//
// By default each layout runs with one choice of options, so that every pair of values of two
// factors occurs. Every third layout runs in single precision too. With LOCKSTEP_ALL_LAYOUTS=1 each
// runs with all 32 choices in both precisions: 2,176 runs.

#include <gtest/gtest.h>

#include <cstdlib>
#include <iostream>
#include <set>
#include <tuple>

#include "lockstep/tests/training/trainer_layouts.h"

namespace lockstep {
namespace {

using testing::joined;
using testing::kTrainerSteps;
using testing::Outcome;
using testing::Overrides;
using testing::TrainerLayout;
using testing::TrainerLayoutsTest;

std::vector<TrainerLayout> all_layouts() {
  std::vector<TrainerLayout> list;
  for (const int64_t tp : {1, 2, 4})
    for (const bool sp : {false, true})
      for (const int64_t pp : {1, 2, 4})
        for (const int64_t vpp : {1, 2})
          for (const int64_t dp : {1, 2})
            if (tp * pp * dp <= 8 && (tp > 1 || !sp) && (pp > 1 || vpp == 1))
              list.push_back({tp, sp, pp, vpp, dp});
  return list;
}

/// Options that must not matter, or that one process can have as well.
struct Options {
  bool untied, grouped, biased, distributed, overlapped;
  bool varied = false;  ///< with more options, which have no column

  static constexpr size_t kAll = 32, kRows = 8;

  static Options number(size_t n) {
    return {(n & 1) != 0, (n & 2) != 0, (n & 4) != 0, (n & 8) != 0, (n & 16) != 0};
  }

  /// Row `n` of 8, in which every pair of values of two options occurs.
  static Options row(size_t n) {
    Options options = number(n % kRows);
    options.distributed = options.untied != options.grouped;
    options.overlapped = options.untied != options.biased;
    options.varied = true;
    return options;
  }

  /// The overrides that one process trains with too.
  Overrides model() const {
    Overrides list;
    const auto add = [&](bool chosen, const Overrides& more) {
      if (chosen) list.insert(list.end(), more.begin(), more.end());
    };
    add(untied, {"model.untie_embeddings_and_output_weights=true", "model.vocab_size=257"});
    add(grouped, {"model.num_query_groups=2"});
    add(varied && grouped && untied, {"model.num_query_groups=1", "model.add_qkv_bias=true"});
    add(biased, {"model.add_bias_linear=true", "model.normalization=LayerNorm",
                 "model.activation=gelu", "model.position_embedding_type=learned_absolute"});
    add(varied && untied && biased,
        {"model.recompute_granularity=full", "model.recompute_num_layers=2"});
    return list;
  }

  Overrides run(const TrainerLayout& layout) const {
    Overrides list = model();
    const std::string on = overlapped ? "true" : "false";
    list.insert(list.end(), {"ddp.overlap_grad_reduce=" + on, "ddp.bucket_size=1000"});
    if (distributed)
      list.insert(list.end(),
                  {"ddp.use_distributed_optimizer=true", "ddp.overlap_param_gather=" + on});
    if (varied && untied && biased && layout.tp > 1 && !layout.sp)
      list.emplace_back("model.distribute_saved_activations=true");
    return list;
  }

  /// The values of all factors, including those of the layout.
  std::vector<int64_t> factors(const TrainerLayout& layout) const {
    return {layout.tp, layout.sp, layout.pp, layout.vpp,  layout.dp,
            untied,    grouped,   biased,    distributed, overlapped};
  }

  std::string text() const {
    return std::string(untied ? "untied" : "tied") + (grouped ? ", GQA" : ", MHA") +
           (biased ? ", biases" : "") + (distributed ? ", distributed optimizer" : "") +
           (overlapped ? ", overlap" : "");
  }
};

struct Case {
  Options options;
  bool single = false;

  /// In single precision a model whose gradient norms one process reproduces to 2e-6, whatever the
  /// size of its micro-batches. With smaller weights and three times the rate it is only 2e-4.
  Overrides precision() const {
    if (!single) return {};
    return {"train.precision=fp32", "optimizer.adam_eps=1e-4", "optimizer.lr=0.003",
            "model.init_method_std=0.1"};
  }
};

/// The cases of layout number `k`.
std::vector<Case> chosen_cases(size_t k) {
  const size_t row = k + k / Options::kRows;
  std::vector<Case> cases = {{Options::row(row)}};
  if (k % 3 == 1) cases.push_back({Options::row(row + 3), true});
  return cases;
}

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (const bool single : {false, true})
    for (size_t n = 0; n < Options::kAll; ++n) cases.push_back({Options::number(n), single});
  return cases;
}

using Pairs = std::set<std::tuple<size_t, int64_t, size_t, int64_t>>;

/// Adds all pairs of values of two factors.
void add_pairs(const std::vector<int64_t>& factors, Pairs& pairs) {
  for (size_t i = 0; i < factors.size(); ++i)
    for (size_t k = 0; k < i; ++k) pairs.emplace(k, factors[k], i, factors[i]);
}

TEST_F(TrainerLayoutsTest, EveryLayoutTrainsAsOneProcess) {
  const bool everything = std::getenv("LOCKSTEP_ALL_LAYOUTS") != nullptr;
  std::map<Overrides, Outcome> one_process;
  const auto expected = [&](const TrainerLayout& layout, const Case& one) -> const Outcome& {
    const Overrides model = joined(joined(one.options.model(), layout.depth()), one.precision());
    Outcome& outcome = one_process[model];
    if (outcome.curve.empty()) {
      outcome = train({}, model);
      EXPECT_LT(outcome.curve[2 * (kTrainerSteps - 1)], outcome.curve[0] - 0.05);  // it learns
    }
    return outcome;
  };
  Pairs covered, all;
  size_t count = 0;
  const std::vector<TrainerLayout> layouts = all_layouts();
  for (size_t k = 0; k < layouts.size(); ++k) {
    const TrainerLayout& layout = layouts[k];
    const std::vector<Case> cases = everything ? all_cases() : chosen_cases(k);
    std::vector<Overrides> overrides;
    for (const Case& one : cases)
      overrides.push_back(joined(joined(one.options.run(layout), layout.depth()), one.precision()));
    const std::vector<Outcome> found = train_all(layout, overrides);
    for (size_t r = 0; r < cases.size(); ++r) {
      SCOPED_TRACE(layout.text() + ": " + cases[r].options.text());
      expect_close(found[r], expected(layout, cases[r]), cases[r].single ? 2e-5 : 1e-12, layout.tp);
      if (!cases[r].single) add_pairs(cases[r].options.factors(layout), covered);
    }
    for (size_t n = 0; n < Options::kAll; ++n) add_pairs(Options::number(n).factors(layout), all);
    count += cases.size();
    if (everything) std::cout << layout.text() << ": " << count << " runs" << std::endl;
  }
  EXPECT_EQ(count, everything ? 34 * 64 : 34 + 11);
  EXPECT_EQ(covered, all);  // every pair that a layout allows
}

}  // namespace
}  // namespace lockstep
