#include "lockstep/distributed/param_layout.h"

#include <gtest/gtest.h>

#include <limits>
#include <random>

#include "lockstep/core/error.h"

namespace lockstep {
namespace {

using Ranges = std::vector<std::pair<int64_t, int64_t>>;

/// A layout case of Megatron Core. Parameters are in registration order.
struct GoldenCase {
  const char* name;
  std::vector<LayoutParam> params;
  LayoutOptions options;
  Ranges slots;    ///< in registration order; empty: not compared
  Ranges buckets;  ///< in buffer order
  std::vector<int64_t> unpadded;
};

LayoutOptions plain(std::optional<int64_t> bucket_size = {}) {
  return {.bucket_size = bucket_size};
}

LayoutOptions sharded(int64_t data_parallel_size, std::optional<int64_t> bucket_size = {}) {
  return {.bucket_size = bucket_size,
          .distributed_optimizer = true,
          .data_parallel_size = data_parallel_size};
}

LayoutOptions sharded_high_bandwidth(int64_t data_parallel_size) {
  LayoutOptions options = sharded(data_parallel_size);
  options.pad_for_high_bus_bandwidth = true;
  return options;
}

std::vector<LayoutParam> sizes(std::initializer_list<int64_t> numels) {
  std::vector<LayoutParam> params;
  for (const int64_t numel : numels) params.push_back({.numel = numel});
  return params;
}

std::vector<LayoutParam> shared(std::vector<LayoutParam> params, size_t index) {
  params[index].shared_embedding = true;
  return params;
}

/// `layers` weights, each followed by a bias if `bias` is not 0.
std::vector<LayoutParam> stack(int layers, int64_t weight, int64_t bias = 0) {
  std::vector<LayoutParam> params;
  for (int i = 0; i < layers; ++i) {
    params.push_back({.numel = weight});
    if (bias > 0) params.push_back({.numel = bias});
  }
  return params;
}

/// `count` adjacent buckets of `step` elements, starting at `start`.
Ranges repeat(int count, int64_t step, int64_t start = 0) {
  Ranges ranges;
  for (int i = 0; i < count; ++i) ranges.emplace_back(start + i * step, start + (i + 1) * step);
  return ranges;
}

Ranges join(Ranges a, const Ranges& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

std::vector<int64_t> times(int count, int64_t value, std::vector<int64_t> rest = {}) {
  std::vector<int64_t> values(static_cast<size_t>(count), value);
  values.insert(values.end(), rest.begin(), rest.end());
  return values;
}

const std::vector<GoldenCase> kGoldenCases = {
    {"G28", sizes({10000, 2500}), plain(), {{2500, 12500}, {0, 2500}}, {{0, 12500}}, {12500}},
    {"G29",
     sizes({10000, 10000, 10000}),
     plain(15000),
     {},
     {{0, 20000}, {20000, 30000}},
     {20000, 10000}},
    {"G30", stack(4, 10000), plain(15000), {}, repeat(2, 20000), {20000, 20000}},
    {"G31", sizes({97, 103}), sharded(2), {{128, 225}, {0, 103}}, {{0, 256}}, {225}},
    {"G32", sizes({1000, 1000}), sharded(4), {{1024, 2024}, {0, 1000}}, {{0, 2048}}, {2024}},
    {"G33 dp3", sizes({1000}), sharded(3), {}, {{0, 1152}}, {1000}},
    {"G33 dp8", sizes({1000}), sharded(8), {}, {{0, 1024}}, {1000}},
    {"G33 dp256", sizes({1000}), sharded(256), {}, {{0, 1024}}, {1000}},
    {"G33 high bandwidth", sizes({1000}), sharded_high_bandwidth(2), {}, {{0, 65536}}, {1000}},
    {"G34", shared(sizes({1000, 1000}), 1), sharded(2), {}, repeat(2, 1024), {1000, 1000}},
    {"G35", shared(sizes({1000, 1000}), 0), sharded(2), {}, repeat(2, 1024), {1024, 1000}},
    {"G36",
     stack(3, 5000),
     sharded(2, 8000),
     {{10112, 15112}, {5056, 10056}, {0, 5000}},
     {{0, 10112}, {10112, 15232}},
     {10056, 5000}},
    {"G37",
     shared(stack(4, 5000), 3),
     sharded(2, 8000),
     {},
     {{0, 5120}, {5120, 15232}, {15232, 20352}},
     {5000, 10056, 5000}},
    {"G38",
     sizes({640, 1280, 960}),
     sharded(1),
     {{2240, 2880}, {960, 2240}, {0, 960}},
     {{0, 2944}},
     {2880}},
    {"G39", sizes({16, 4}), sharded(2), {{64, 80}, {0, 4}}, {{0, 128}}, {80}},
    {"G40", stack(2, 9898), sharded(8), {{9920, 19818}, {0, 9898}}, {{0, 19840}}, {19818}},
    {"G41 plain", stack(10, 9025), plain(), {}, {{0, 90250}}, {90250}},
    {"G41 sharded", stack(10, 9025), sharded(8), {}, {{0, 90880}}, {90817}},
    {"G42 plain", stack(10, 9025, 95), plain(), {}, {{0, 91200}}, {91200}},
    {"G42 sharded", stack(10, 9025, 95), sharded(8), {}, {{0, 92160}}, {92097}},
    {"G43",
     shared(stack(10, 9025), 9),
     sharded(8),
     {},
     {{0, 9088}, {9088, 9088 + 81792}},
     {9025, 81729}},
    {"G44 plain 9000", stack(10, 9025), plain(9000), {}, repeat(10, 9025), times(10, 9025)},
    {"G44 plain 9025", stack(10, 9025), plain(9025), {}, repeat(10, 9025), times(10, 9025)},
    {"G44 sharded", stack(10, 9025), sharded(8, 9000), {}, repeat(10, 9088), times(10, 9025)},
    {"G44 bias plain", stack(10, 9025, 95), plain(9000), {}, repeat(10, 9120), times(10, 9120)},
    {"G44 bias sharded",
     stack(10, 9025, 95),
     sharded(8, 9000),
     {},
     repeat(10, 9216),
     times(10, 9153)},
    {"G45 plain", stack(10, 9025), plain(9050), {}, repeat(5, 18050), times(5, 18050)},
    {"G45 sharded", stack(10, 9025), sharded(8, 9050), {}, repeat(5, 18176), times(5, 18113)},
    {"G45 bias plain", stack(10, 9025, 95), plain(9050), {}, repeat(10, 9120), times(10, 9120)},
    {"G45 shared",
     shared(stack(10, 9025), 9),
     sharded(8, 9050),
     {},
     join(join(repeat(1, 9088), repeat(4, 18176, 9088)), repeat(1, 9088, 9088 + 4 * 18176)),
     {9025, 18113, 18113, 18113, 18113, 9025}},
    {"G46 plain 18000", stack(10, 9025), plain(18000), {}, repeat(5, 18050), times(5, 18050)},
    {"G46 plain 20000",
     stack(10, 9025),
     plain(20000),
     {},
     join(repeat(3, 27075), {{81225, 90250}}),
     times(3, 27075, {9025})},
    {"G46 sharded 18000",
     stack(10, 9025),
     sharded(8, 18000),
     {},
     repeat(5, 18176),
     times(5, 18113)},
    {"G46 sharded 20000",
     stack(10, 9025),
     sharded(8, 20000),
     {},
     join(repeat(3, 27264), {{81792, 90880}}),
     times(3, 27201, {9025})},
    {"G46 bias plain 18000",
     stack(10, 9025, 95),
     plain(18000),
     {},
     repeat(5, 18240),
     times(5, 18240)},
    {"G46 bias plain 20000",
     stack(10, 9025, 95),
     plain(20000),
     {},
     join(repeat(3, 27360), {{82080, 91200}}),
     times(3, 27360, {9120})},
    {"G46 bias sharded 18000",
     stack(10, 9025, 95),
     sharded(8, 18000),
     {},
     repeat(5, 18432),
     times(5, 18369)},
    {"G46 bias sharded 20000",
     stack(10, 9025, 95),
     sharded(8, 20000),
     {},
     join(repeat(3, 27648), {{82944, 92160}}),
     times(3, 27585, {9153})},
    {"G47", stack(10, 10000, 100), sharded(8), {}, {{0, 101760}}, {101712}},
    {"G47 two layers", stack(2, 10000, 100), sharded(8), {}, {{0, 20352}}, {20304}},
    {"G48 dense", stack(3, 9025, 95), sharded(8), {}, {{0, 27648}}, {27585}},
    {"G48 expert", stack(2, 9025, 95), sharded(8), {}, {{0, 18432}}, {18369}},
};

TEST(ParamLayout, GoldenTables) {
  for (const GoldenCase& golden : kGoldenCases) {
    const ParamLayout layout = compute_param_layout(golden.params, golden.options);
    Ranges slots, buckets;
    std::vector<int64_t> unpadded;
    for (const auto& slot : layout.slots) slots.emplace_back(slot.start, slot.end);
    for (const auto& bucket : layout.buckets) {
      buckets.emplace_back(bucket.start, bucket.end);
      unpadded.push_back(bucket.numel_unpadded);
    }
    if (!golden.slots.empty()) {
      EXPECT_EQ(slots, golden.slots) << golden.name;
    }
    EXPECT_EQ(buckets, golden.buckets) << golden.name;
    EXPECT_EQ(unpadded, golden.unpadded) << golden.name;
    EXPECT_EQ(layout.numel, golden.buckets.back().second) << golden.name;
  }
}

TEST(ParamLayout, G26ParamStarts) {
  EXPECT_EQ(pad_param_start(0), 0);
  EXPECT_EQ(pad_param_start(1), 64);
  EXPECT_EQ(pad_param_start(63), 64);
  EXPECT_EQ(pad_param_start(64), 64);
  EXPECT_THROW(pad_param_start(std::numeric_limits<int64_t>::max()), UsageError);
  EXPECT_EQ(pad_param_start(65), 128);
}

TEST(ParamLayout, G27BucketEnds) {
  EXPECT_EQ(pad_bucket_end(1, 4, false), 128);
  EXPECT_EQ(pad_bucket_end(1, 4, true), 65536);
  EXPECT_EQ(pad_bucket_end(129, 3, false), 384);
}

TEST(ParamLayout, G52BucketSizes) {
  DistributedDataParallelConfig config;
  EXPECT_EQ(effective_bucket_size(config, 100, 100), 100'000'000);
  EXPECT_EQ(effective_bucket_size(config, 100, 7), 40'000'000);
  EXPECT_EQ(effective_bucket_size(config, 100, 1), 40'000'000);
  config.overlap_grad_reduce = false;
  EXPECT_EQ(effective_bucket_size(config, 100, 100), std::nullopt);
  config.overlap_grad_reduce = true;
  config.num_buckets = 4;
  EXPECT_EQ(effective_bucket_size(config, 100, 100), 25);
  EXPECT_EQ(effective_bucket_size(config, 3, 1), 1);
}

TEST(ParamLayout, SharedEmbeddingsMatterToTheDistributedOptimizerOnly) {
  const auto params = shared(sizes({10, 10, 10}), 1);
  EXPECT_EQ(compute_param_layout(params, plain()).buckets.size(), 1u);
  EXPECT_EQ(compute_param_layout(params, sharded(2)).buckets.size(), 3u);
}

TEST(ParamLayout, ExactFitClosesTheBucket) {
  const ParamLayout layout = compute_param_layout(sizes({4, 4, 4, 4}), plain(8));
  ASSERT_EQ(layout.buckets.size(), 2u);
  EXPECT_EQ(layout.buckets[0].params, (std::vector<int64_t>{3, 2}));
}

TEST(ParamLayout, NoParametersAndEmptyParameters) {
  EXPECT_EQ(compute_param_layout({}, plain()).buckets.size(), 0u);
  const ParamLayout layout = compute_param_layout(sizes({0, 5, 0}), plain(1));
  EXPECT_EQ(layout.numel, 5);
  ASSERT_EQ(layout.buckets.size(), 2u);
  EXPECT_EQ(layout.buckets[0].params, (std::vector<int64_t>{2, 1}));
  EXPECT_EQ(layout.buckets[1].params, (std::vector<int64_t>{0}));
}

TEST(ParamLayout, NonsenseIsRefused) {
  EXPECT_THROW(compute_param_layout(sizes({-1}), plain()), UsageError);
  EXPECT_THROW(compute_param_layout(sizes({1}), plain(0)), UsageError);
  EXPECT_THROW(compute_param_layout(sizes({1}), sharded(0)), UsageError);
}

TEST(ParamLayout, OffsetsThatDoNotFitAreRefused) {
  constexpr int64_t kLargest = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(compute_param_layout(sizes({kLargest - 1, 1}), plain()).numel, kLargest);
  EXPECT_THROW(compute_param_layout(sizes({kLargest, 1}), plain()), UsageError);
  EXPECT_THROW(compute_param_layout(sizes({kLargest}), sharded(1)), UsageError);
  EXPECT_THROW(compute_param_layout(sizes({1}), sharded(kLargest)), UsageError);
  constexpr int64_t kTwoThirds = kLargest / 3 * 2;
  EXPECT_THROW(compute_param_layout(sizes({kTwoThirds + 1000}), sharded(kTwoThirds / 128 | 1)),
               UsageError);
}

TEST(ParamLayout, RandomLayoutsHoldTheInvariants) {
  std::mt19937 random(1);
  const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % n); };
  for (int trial = 0; trial < 2000; ++trial) {
    std::vector<LayoutParam> params(1 + below(12));
    for (LayoutParam& param : params)
      param = {.numel = 1 + below(700), .shared_embedding = below(6) == 0};
    LayoutOptions options;
    options.distributed_optimizer = below(2) == 1;
    options.data_parallel_size = 1 + below(9);
    if (below(2) == 1) options.bucket_size = 1 + below(2000);
    const ParamLayout layout = compute_param_layout(params, options);

    // Buckets tile the buffer. Parameters lie in reverse order, inside their bucket, without
    // overlap.
    int64_t end = 0, unpadded = 0;
    for (const auto& bucket : layout.buckets) {
      ASSERT_EQ(bucket.start, end);
      ASSERT_LE(bucket.start + bucket.numel_unpadded, bucket.end);
      if (options.distributed_optimizer) {
        ASSERT_EQ(bucket.end % options.data_parallel_size, 0);
      } else {
        ASSERT_EQ(bucket.numel_unpadded, bucket.end - bucket.start);
      }
      end = bucket.end;
      unpadded += bucket.numel_unpadded;
    }
    ASSERT_EQ(layout.numel, end);
    ASSERT_EQ(layout.numel_unpadded, unpadded);
    int64_t after = 0;
    for (size_t i = params.size(); i-- > 0;) {
      const auto& slot = layout.slots[i];
      ASSERT_EQ(slot.end - slot.start, params[i].numel);
      ASSERT_GE(slot.start, after);
      if (options.distributed_optimizer) {
        ASSERT_EQ(slot.start % 64, 0);
      }
      const auto& bucket = layout.buckets[static_cast<size_t>(slot.bucket)];
      ASSERT_GE(slot.start, bucket.start);
      ASSERT_LE(slot.end, bucket.end);
      after = slot.end;
    }
  }
}

/// Number of parameters in each bucket.
std::vector<size_t> bucket_sizes(const std::vector<int64_t>& numels, int64_t limit) {
  std::vector<LayoutParam> params;
  for (const int64_t numel : numels) params.push_back({.numel = numel});
  std::vector<size_t> sizes;
  for (const auto& bucket : compute_param_layout(params, {.bucket_limit = limit}).buckets)
    sizes.push_back(bucket.params.size());
  return sizes;
}

TEST(ParamLayout, ALimitAllowsAnExactFitAndAParameterThatIsLargerLiesAlone) {
  using Sizes = std::vector<size_t>;
  EXPECT_EQ(bucket_sizes({5, 5, 5, 5}, 10), (Sizes{2, 2}));
  EXPECT_EQ(bucket_sizes({10, 10, 10}, 10), (Sizes{1, 1, 1}));
  EXPECT_EQ(bucket_sizes({1, 25, 1, 2}, 10), (Sizes{2, 1, 1}));
  EXPECT_EQ(bucket_sizes({3, 4, 0}, 7), (Sizes{3}));
  EXPECT_EQ(bucket_sizes({3, 5}, 7), (Sizes{1, 1}));
  EXPECT_THROW(bucket_sizes({1}, 0), UsageError);
}

}  // namespace
}  // namespace lockstep
