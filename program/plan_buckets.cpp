#include <algorithm>
#include <iostream>
#include <memory>
#include <utility>

#include "lockstep/core/check.h"
#include "lockstep/core/counted.h"
#include "lockstep/core/integers.h"
#include "lockstep/distributed/shard_ranges.h"
#include "lockstep/program/plan_arguments.h"

namespace lockstep {
namespace {

struct BucketsArguments {
  std::vector<int64_t> numels;
  std::vector<int64_t> shared;
  LayoutOptions options;
  std::optional<int64_t> num_buckets;
  bool json = false;
};

/// Formats to standard output in large pieces.
class BufferedOutput {
 public:
  BufferedOutput() = default;
  ~BufferedOutput() { flush(); }
  BufferedOutput(const BufferedOutput&) = delete;
  BufferedOutput& operator=(const BufferedOutput&) = delete;

  template <class... Args>
  void write(fmt::format_string<Args...> text, Args&&... args) {
    fmt::format_to(std::back_inserter(buffer_), text, std::forward<Args>(args)...);
    if (buffer_.size() > kCapacity) flush();
  }

 private:
  static constexpr size_t kCapacity = 1 << 16;

  void flush() {
    std::cout.write(buffer_.data(), static_cast<std::streamsize>(buffer_.size()));
    buffer_.clear();
  }

  fmt::memory_buffer buffer_;
};

int64_t sum_of(const std::vector<int64_t>& numels) {
  int64_t sum = 0;
  for (const int64_t numel : numels) sum = checked_add(sum, numel, "sum");
  return sum;
}

std::vector<LayoutParam> layout_params(const BucketsArguments& arguments) {
  std::vector<LayoutParam> params;
  for (const int64_t numel : arguments.numels) params.push_back({.numel = numel});
  for (const int64_t index : arguments.shared) {
    require<ConfigError>(index >= 0 && index < static_cast<int64_t>(params.size()),
                         "--shared: found {}, allowed: 0 to {}, because --numel has {} parameters",
                         index, params.size() - 1, params.size());
    bool& shared = params[static_cast<size_t>(index)].shared_embedding;
    require<ConfigError>(!shared, "--shared: found {} twice, allowed: each index once", index);
    shared = true;
  }
  return params;
}

ParamLayout layout_of(const BucketsArguments& arguments) {
  LayoutOptions options = arguments.options;
  if (arguments.num_buckets)
    options.bucket_size = std::max<int64_t>(sum_of(arguments.numels) / *arguments.num_buckets, 1);
  return compute_param_layout(layout_params(arguments), options);
}

/// Goes between the items of a list.
class Separator {
 public:
  const char* next() { return std::exchange(text_, ","); }

 private:
  const char* text_ = "";
};

void write_layout_json(BufferedOutput& out, const ParamLayout& layout,
                       const LayoutOptions& options) {
  Separator params, buckets, shards;
  out.write(R"({{"numel":{},"numel_unpadded":{},"params":[)", layout.numel, layout.numel_unpadded);
  for (const ParamLayout::Bucket& bucket : layout.buckets)
    for (const int64_t index : bucket.params) {
      const ParamLayout::Slot& slot = layout.slots[static_cast<size_t>(index)];
      out.write(R"({}{{"index":{},"start":{},"end":{},"bucket":{}}})", params.next(), index,
                slot.start, slot.end, slot.bucket);
    }
  out.write(R"(],"buckets":[)");
  for (const ParamLayout::Bucket& bucket : layout.buckets)
    out.write(R"({}{{"start":{},"end":{},"numel_unpadded":{},"params":[{}]}})", buckets.next(),
              bucket.start, bucket.end, bucket.numel_unpadded, fmt::join(bucket.params, ","));
  out.write(R"(],"shards":[)");
  if (options.distributed_optimizer)
    visit_shards(layout, options.data_parallel_size, [&](const ParamShard& shard) {
      out.write(
          R"({}{{"bucket":{},"rank":{},"param":{},"param_start":{},"param_end":{},"buffer_start":{},"buffer_end":{}}})",
          shards.next(), shard.bucket, shard.rank, shard.param, shard.in_param.start,
          shard.in_param.end, shard.in_buffer.start, shard.in_buffer.end);
    });
  out.write("]}}\n");
}

void write_layout_text(BufferedOutput& out, const ParamLayout& layout,
                       const LayoutOptions& options) {
  out.write("buffer of {}, {} without the padding of buckets; {}, {}\n",
            counted(layout.numel, "element"), layout.numel_unpadded,
            counted(static_cast<int64_t>(layout.slots.size()), "parameter"),
            counted(static_cast<int64_t>(layout.buckets.size()), "bucket"));
  out.write("\n{:>9}  {:>12}  {:>12}  {:>6}\n", "parameter", "start", "end", "bucket");
  for (const ParamLayout::Bucket& bucket : layout.buckets)
    for (const int64_t index : bucket.params) {
      const ParamLayout::Slot& slot = layout.slots[static_cast<size_t>(index)];
      out.write("{:>9}  {:>12}  {:>12}  {:>6}\n", index, slot.start, slot.end, slot.bucket);
    }
  out.write("\n{:>6}  {:>12}  {:>12}  {:>12}  parameters\n", "bucket", "start", "end", "unpadded");
  for (size_t b = 0; b < layout.buckets.size(); ++b) {
    const ParamLayout::Bucket& bucket = layout.buckets[b];
    out.write("{:>6}  {:>12}  {:>12}  {:>12}  {}\n", b, bucket.start, bucket.end,
              bucket.numel_unpadded, fmt::join(bucket.params, " "));
  }
  if (!options.distributed_optimizer) return;
  out.write("\n{:>6}  {:>6}  {:>9}  {:>12}  {:>12}  {:>12}  {:>12}\n", "bucket", "rank",
            "parameter", "from", "to", "start", "end");
  visit_shards(layout, options.data_parallel_size, [&](const ParamShard& shard) {
    out.write("{:>6}  {:>6}  {:>9}  {:>12}  {:>12}  {:>12}  {:>12}\n", shard.bucket, shard.rank,
              shard.param, shard.in_param.start, shard.in_param.end, shard.in_buffer.start,
              shard.in_buffer.end);
  });
}

void plan_buckets(const CLI::App& command, const BucketsArguments& arguments) {
  try {
    const ParamLayout layout = layout_of(arguments);
    BufferedOutput out;
    (arguments.json ? write_layout_json : write_layout_text)(out, layout, arguments.options);
  } catch (const UsageError& error) {
    fail<ConfigError>("--numel, --data-parallel ({}): {}", arguments.options.data_parallel_size,
                      error.what());
  }
  flush_output(command);
}

std::string check_numels(const std::string& text) {
  const std::vector<int64_t> numels = parse_integers(text, ',');
  for (size_t i = 0; i < numels.size(); ++i)
    if (numels[i] < 1)
      return fmt::format("parameter {}: found {} elements, allowed: >= 1", i, numels[i]);
  return check_integers(text);
}

void add_parameter_options(CLI::App& command, BucketsArguments& arguments) {
  const auto list = [&](const char* name, std::vector<int64_t>& target, const char* meaning) {
    return command
        .add_option_function<std::string>(
            name, [&target](const std::string& text) { target = parse_integers(text, ','); },
            meaning)
        ->type_name("INT,INT,...");
  };
  list("--numel", arguments.numels,
       "Number of elements of each parameter, in the order of registration")
      ->required()
      ->check(check_numels);
  list("--shared", arguments.shared,
       "Indices of tied embeddings in --numel, counted from 0; with the distributed optimizer each "
       "of them has its own bucket")
      ->check(check_integers);
}

void add_layout_options(CLI::App& command, BucketsArguments& arguments) {
  LayoutOptions& options = arguments.options;
  command
      .add_option(
          "--data-parallel", options.data_parallel_size,
          "Number of data-parallel ranks; the distributed optimizer shards each bucket over "
          "them")
      ->required()
      ->check(check_at_least(1));
  CLI::Option* const bucket_size =
      command
          .add_option(
              "--bucket-size", options.bucket_size,
              "A bucket closes once it holds at least this many elements. If neither this nor "
              "--num-buckets is given, there is one bucket")
          ->check(check_at_least(1));
  command
      .add_option("--num-buckets", arguments.num_buckets,
                  "Set the bucket size to the sum of --numel divided by this, rounded down")
      ->check(check_at_least(1))
      ->excludes(bucket_size);
  command.add_flag("--distributed-optimizer", options.distributed_optimizer,
                   "Align parameters to 64 elements, pad buckets to equal shards, list the shards");
  command.add_flag(
      "--pad-for-high-bus-bandwidth", options.pad_for_high_bus_bandwidth,
      "With the distributed optimizer: also pad buckets to multiples of 65536 elements");
}

constexpr const char* kBucketsFooter =
    "All sizes, offsets and ranges count elements. Ranges are half open: the end is the first "
    "element after the range.\n"
    "JSON: numel; numel_unpadded (without the padding at the ends of buckets); params (index, "
    "start, end, bucket) and buckets (start, end, numel_unpadded, params) in the order of the "
    "buffer; shards (for each bucket and rank the parts of parameters that the rank owns: bucket, "
    "rank, param, param_start and param_end in the parameter, buffer_start and buffer_end in the "
    "buffer; empty without the distributed optimizer).";

}  // namespace

void add_plan_buckets_command(CLI::App& plan) {
  auto arguments = std::make_shared<BucketsArguments>();
  CLI::App* const command = plan.add_subcommand(
      "buckets", "Compute the layout of one gradient buffer: offsets, buckets, shards");
  add_parameter_options(*command, *arguments);
  add_layout_options(*command, *arguments);
  command->add_flag("--json", arguments->json, "Print one JSON document");
  command->footer(kBucketsFooter);
  command->callback([command, arguments] { plan_buckets(*command, *arguments); });
}

}  // namespace lockstep
