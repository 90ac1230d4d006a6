#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include "lockstep/core/error.h"
#include "lockstep/models/context_parallel.h"
#include "lockstep/tests/support/rank_threads.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::CollectiveLog;
using testing::run_ranks;
using testing::throws_with;
using Communication = ContextCommunication;

TEST(ContextParallelMisuse, BoundsThatCannotBe) {
  const auto attend = [](ContextAttentionOptions options, SequenceDocuments bounds) {
    options.bounds = std::make_shared<const SequenceDocuments>(std::move(bounds));
    return [options, x = at::ones({8, 2, 2, 4})] {
      const ParallelState state = ParallelState::single_process(c10::kCPU);
      context_attention(x, x, x, ContextParallel::of(state, Communication::p2p), options);
    };
  };
  EXPECT_TRUE(throws_with<UsageError>(attend({.causal = false}, {{8}, {8}}),
                                      "found bounds without causal attention, allowed"));
  EXPECT_TRUE(throws_with<UsageError>(attend({.documents = {4, 4}}, {{8}, {8}}),
                                      "found bounds beside documents, allowed"));
  EXPECT_TRUE(
      throws_with<UsageError>(attend({}, {{8}}), "bounds: found those of 1 sequences, allowed: 2"));
  EXPECT_TRUE(throws_with<UsageError>(attend({}, {{8}, {8, 0}}), "in documents of >= 1"));
}

TEST(ContextParallelMisuse, EmptyDocumentsAndSequencesAreRefusedBeforeAnythingIsSent) {
  const auto refuses = [](const ContextParallel& context, int64_t length,
                          const std::vector<int64_t>& documents, const std::string& text) {
    const at::Tensor x = at::ones({length, 1, 2, 2});
    EXPECT_TRUE(throws_with<UsageError>(
        [&] { context_attention(x, x, x, context, {.documents = documents}); },
        "found a document of " + text + " tokens, allowed: "));
  };
  for (const int64_t ranks : {1, 2})
    for (const auto communication :
         {Communication::p2p, Communication::all_gather, Communication::a2a}) {
      CollectiveLog log;
      run_ranks(ranks,
                [&](const ParallelState& state) {
                  const auto context = ContextParallel::of(state, communication);
                  refuses(context, 8 / ranks, {0, 8}, "0");
                  refuses(context, 8 / ranks, {16, -8}, "-8");
                  refuses(context, 0, {}, "0");
                },
                {.sizes = {.context = ranks}, .log = &log});
      EXPECT_TRUE(log.of_rank(0).empty());
    }
}

TEST(ContextParallelMisuse, ShapesAndLayoutsThatCannotBe) {
  run_ranks(2,
            [](const ParallelState& state) {
              const auto attention = [&](std::vector<int64_t> q, std::vector<int64_t> k,
                                         Communication communication,
                                         std::vector<int64_t> documents) {
                context_attention(at::ones(q), at::ones(k), at::ones(k),
                                  ContextParallel::of(state, communication),
                                  {.documents = std::move(documents)});
              };
              EXPECT_TRUE(throws_with<UsageError>(
                  [&] {
                    attention({4, 1, 3, 2}, {4, 1, 2, 2}, Communication::p2p, {});
                  },
                  "4 x 1 x 3 x 2"));
              EXPECT_TRUE(throws_with<UsageError>(
                  [&] {
                    attention({4, 1, 2, 2}, {4, 1, 0, 2}, Communication::p2p, {});
                  },
                  "4 x 1 x 0 x 2"));
              EXPECT_TRUE(throws_with<UsageError>(
                  [&] {
                    attention({3, 1, 2, 2}, {3, 1, 2, 2}, Communication::p2p, {});
                  },
                  "6 tokens"));
              EXPECT_TRUE(throws_with<UsageError>(
                  [&] {
                    attention({4, 1, 2, 2}, {4, 1, 1, 2}, Communication::a2a, {});
                  },
                  "1 key heads"));
              EXPECT_TRUE(throws_with<UsageError>(
                  [&] {
                    attention({4, 1, 2, 2}, {4, 1, 2, 2}, Communication::all_gather, {4});
                  },
                  "4 tokens in all"));
              EXPECT_TRUE(throws_with<ConfigError>(
                  [&] { ContextParallel::of(state, Communication::a2a_p2p); },
                  "hierarchical_context_parallel_sizes: found 0 levels"));
            },
            {.sizes = {.context = 2}});
}

}  // namespace
}  // namespace lockstep
