// The data pipeline, in two parts.
//
//   data_pipeline loader: how long a step waits for its micro-batch. A data set of 32 M tokens with
//   documents of 200 to 4000 tokens; micro-batches of 8 samples of 2048 tokens. The step is a
//   sleep, so that the thread that reads ahead has its own core, as in a run on a GPU.
//   data_pipeline tokenize TOKENIZER FILE: reads a number of threads from each line of standard
//   input, encodes the file with one part of its lines on each thread, and prints the seconds and
//   the number of tokens; tokenizer.py runs it and others in turn.

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>
#include <random>
#include <thread>

#include "lockstep/benchmarks/interleaved.h"
#include "lockstep/datasets/indexed_dataset_writer.h"
#include "lockstep/datasets/microbatch_loader.h"
#include "lockstep/datasets/tokenizer.h"

namespace lockstep::benchmarks {
namespace {

constexpr int64_t kTokens = 32'000'000, kLength = 2048, kMicro = 8;
constexpr int kSteps = 40;

std::string write_dataset() {
  const std::string prefix =
      std::filesystem::temp_directory_path() / ("data_pipeline_" + std::to_string(::getpid()));
  std::mt19937 random(1);
  IndexedDatasetWriter writer(prefix, TokenType::uint16);
  std::vector<int64_t> ids;
  while (writer.num_tokens() < kTokens) {
    ids.resize(200 + random() % 3800);
    for (int64_t& id : ids) id = random() % 50257;
    writer.append(ids);
    writer.end_sequence();
    writer.end_document();
  }
  writer.finish();
  return prefix;
}

/// Returns the milliseconds that each step waits.
double waits(const DataConfig& config, int64_t prefetch, int64_t step_ms) {
  TrainConfig train;
  train.micro_batch_size = kMicro;
  MicrobatchLoader loader(open_samples(config, 50257, kLength, 1).training, {train, 1},
                          {.seq_length = kLength, .rank = 0, .ranks = 1, .prefetch = prefetch});
  loader.next();  // builds the index, starts the thread
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  const double before = loader.seconds_waited();
  for (int step = 0; step < kSteps; ++step) {
    loader.next();
    std::this_thread::sleep_for(std::chrono::milliseconds(step_ms));
  }
  return (loader.seconds_waited() - before) / kSteps * 1000;
}

void measure_loader() {
  DataConfig config;
  const std::string prefix = write_dataset();
  config.path = {prefix};
  config.split = "1,0";
  config.cache_path = prefix + "_cache";
  std::printf("Micro-batches of %lld x %lld tokens out of %lld M; waiting, ms a micro-batch\n",
              static_cast<long long>(kMicro), static_cast<long long>(kLength),
              static_cast<long long>(kTokens / 1'000'000));
  for (const int64_t step_ms : {0, 2, 20})
    for (const int64_t prefetch : {0, 2}) {
      Samples rounds;
      for (int round = 0; round < 5; ++round) rounds.push_back(waits(config, prefetch, step_ms));
      std::printf("  step of %2lld ms, data.prefetch = %lld   %8.4f   [%.4f, %.4f]\n",
                  static_cast<long long>(step_ms), static_cast<long long>(prefetch), median(rounds),
                  *std::min_element(rounds.begin(), rounds.end()),
                  *std::max_element(rounds.begin(), rounds.end()));
    }
  for (const char* suffix : {".bin", ".idx"}) std::filesystem::remove(prefix + suffix);
  std::filesystem::remove_all(*config.cache_path);
}

/// Splits a text into parts of about equal size, which end at line ends.
std::vector<std::string_view> parts_of(std::string_view text, size_t parts) {
  std::vector<std::string_view> found;
  for (; parts > 1; --parts) {
    const size_t end = std::min(text.find('\n', text.size() / parts), text.size() - 1) + 1;
    found.push_back(text.substr(0, end));
    text.remove_prefix(end);
  }
  found.push_back(text);
  return found;
}

void measure_tokenizer(const std::string& name, const std::string& path) {
  const auto tokenizer = make_tokenizer(name, "tokenizer");
  std::vector<std::unique_ptr<Tokenizer>> clones;
  std::ifstream file(path, std::ios::binary);
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  for (std::string line; std::getline(std::cin, line);) {
    const auto parts = parts_of(text, std::stoul(line));
    while (clones.size() < parts.size()) clones.push_back(tokenizer->clone());
    std::atomic<size_t> tokens = 0;
    const double seconds = seconds_of([&] {
      std::vector<std::jthread> threads;
      for (size_t i = 0; i < parts.size(); ++i)
        threads.emplace_back([&, i] { tokens += clones[i]->encode(parts[i]).size(); });
    });
    std::printf("%.6f %zu\n", seconds, tokens.load());
    std::fflush(stdout);
  }
}

}  // namespace
}  // namespace lockstep::benchmarks

int main(int argc, char** argv) {
  using namespace lockstep::benchmarks;
  const std::string part = argc > 1 ? argv[1] : "";
  if (part == "loader") {
    measure_loader();
  } else if (part == "tokenize" && argc == 4) {
    measure_tokenizer(argv[2], argv[3]);
  } else {
    std::fprintf(stderr, "usage: data_pipeline loader | tokenize TOKENIZER FILE\n");
    return 2;
  }
}
