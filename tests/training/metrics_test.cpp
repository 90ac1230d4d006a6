#include "lockstep/training/metrics.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <limits>
#include <map>
#include <sstream>

#include "lockstep/core/error.h"
#include "lockstep/tests/support/temporary_folder.h"
#include "lockstep/tests/support/throws_with.h"
#include "lockstep/training/progress.h"

namespace lockstep {
namespace {

IterationMetrics example() {
  return {.iteration = 120,
          .lm_loss = 0.1 + 0.2,
          .grad_norm = 1.5,
          .learning_rate = 3e-4,
          .consumed_samples = 1920,
          .num_tokens = 2048,
          .iteration_ms = 50,
          .tokens_per_second = 40960,
          .skipped = false};
}

TEST(Metrics, LinesHaveTheContractsFieldsInFullPrecision) {
  EXPECT_EQ(to_json(example()),
            R"({"iteration":120,"lm_loss":0.30000000000000004,"grad_norm":1.5,)"
            R"("learning_rate":0.0003,"consumed_samples":1920,"num_tokens":2048,)"
            R"("iteration_ms":50.0,"tokens_per_second":40960.0,"skipped":false})");
  EXPECT_EQ(to_json(TestMetrics{100, 2.5, 12.25}),
            R"({"iteration":100,"test_loss":2.5,"test_perplexity":12.25})");
  EXPECT_EQ(to_json(ValidationMetrics{100, 2.5, 12.25}),
            R"({"iteration":100,"validation_loss":2.5,"perplexity":12.25})");
}

TEST(Metrics, FieldsThatNotEveryRunHasComeLast) {
  IterationMetrics metrics = example();
  metrics.num_zeros_in_grad = 7;
  metrics.loss_scale = 1024;
  metrics.decoupled_learning_rate = 0.5;
  EXPECT_TRUE(to_json(metrics).ends_with(
      R"("skipped":false,"num_zeros_in_grad":7,"loss_scale":1024.0,"decoupled_learning_rate":0.5})"));
}

IterationMetrics with_telemetry() {
  IterationMetrics metrics = example();
  metrics.times = {.ms = {10, 20, 4, 5, 1, 10}};
  metrics.model_tflops_per_device = 0.5;
  metrics.utilisation = 0.25;
  metrics.memory_bytes = 1000;
  metrics.peak_memory_bytes = 2000;
  metrics.learning_rates = {{"default", 3e-4}, {"wd_mult 0", 3e-4}};
  metrics.grad_norms = {{"default", 1.25}, {"wd_mult 0", 0.75}};
  metrics.slowest_rank = {.rank = 3,
                          .ms = 46,
                          .part = StepPart::data,
                          .behind_ms = 7.5,
                          .times = {.ms = {10, 20, 4, 5, 1, 10}},
                          .first_iteration = 110,
                          .last_iteration = 119};
  return metrics;
}

TEST(Metrics, TelemetryComesAfterTheContractsFields) {
  const std::string times =
      R"("time_ms":{"forward":10.0,"backward":20.0,"communication":4.0,"optimizer":5.0,)"
      R"("data":1.0,"other":10.0})";
  EXPECT_EQ(
      to_json(with_telemetry()),
      to_json(example()).substr(0, to_json(example()).size() - 1) + "," + times +
          R"(,"model_tflops_per_device":0.5,"utilisation":0.25,"memory_bytes":1000,)"
          R"("peak_memory_bytes":2000,"learning_rates":{"default":0.0003,"wd_mult 0":0.0003},)"
          R"("grad_norms":{"default":1.25,"wd_mult 0":0.75},"slowest_rank":{"rank":3,"ms":46.0,)"
          R"("in":"data","behind_ms":7.5,)" +
          times + R"(,"iterations":[110,119]}})");
}

TEST(Metrics, ScalarsAreTheNumbersOfTheLine) {
  std::map<std::string, double> found;
  for (const auto& [tag, value] : to_scalars(with_telemetry())) found[tag] = value;
  const std::map<std::string, double> expected = {{"train/lm_loss", 0.1 + 0.2},
                                                  {"train/grad_norm", 1.5},
                                                  {"train/learning_rate", 3e-4},
                                                  {"train/consumed_samples", 1920},
                                                  {"train/num_tokens", 2048},
                                                  {"train/iteration_ms", 50},
                                                  {"train/tokens_per_second", 40960},
                                                  {"train/skipped", 0},
                                                  {"train/time_ms/forward", 10},
                                                  {"train/time_ms/backward", 20},
                                                  {"train/time_ms/communication", 4},
                                                  {"train/time_ms/optimizer", 5},
                                                  {"train/time_ms/data", 1},
                                                  {"train/time_ms/other", 10},
                                                  {"train/utilisation", 0.25},
                                                  {"train/model_tflops_per_device", 0.5},
                                                  {"train/memory_bytes", 1000},
                                                  {"train/peak_memory_bytes", 2000},
                                                  {"train/grad_norms/default", 1.25},
                                                  {"train/grad_norms/wd_mult 0", 0.75},
                                                  {"train/learning_rates/default", 3e-4},
                                                  {"train/learning_rates/wd_mult 0", 3e-4}};
  EXPECT_EQ(found, expected);
  const std::vector<Scalar> validation = to_scalars(ValidationMetrics{100, 2.5, 12.25});
  ASSERT_EQ(validation.size(), 2u);
  EXPECT_EQ(validation[0].tag, "validation/validation_loss");
  EXPECT_EQ(validation[0].value, 2.5);
  EXPECT_EQ(validation[1].tag, "validation/perplexity");
}

TEST(Metrics, NumbersThatJsonLacksAreNull) {
  IterationMetrics metrics = example();
  metrics.grad_norm = std::numeric_limits<double>::infinity();
  metrics.skipped = true;
  EXPECT_NE(to_json(metrics).find(R"("grad_norm":null)"), std::string::npos);
}

TEST(MetricsFile, KeepsTheFileOfTheRunBefore) {
  const testing::TemporaryFolder folder;
  const std::string deep = folder.path() / "deep";
  MetricsFile(deep).write("first");
  MetricsFile file(deep);
  file.write("second");
  EXPECT_EQ(folder.read("deep/metrics.jsonl"), "second\n");  // while it is still open
  EXPECT_EQ(folder.read("deep/metrics.previous.jsonl"), "first\n");
  EXPECT_TRUE(testing::throws_with<FileError>([] { MetricsFile("/proc/none"); }, "/proc/none"));
}

TEST(MetricsFile, ALinkInItsPlaceIsNotFollowed) {
  const testing::TemporaryFolder folder;
  const std::string other = folder.write("other", "of somebody else");
  std::filesystem::create_symlink(other, folder.path() / "metrics.jsonl");
  MetricsFile(folder.path()).write("first");
  EXPECT_EQ(folder.read("metrics.jsonl"), "first\n");
  EXPECT_EQ(folder.read("other"), "of somebody else");
  std::filesystem::remove(folder.path() / "metrics.jsonl");
  std::filesystem::create_symlink(folder.path() / "nothing", folder.path() / "metrics.jsonl");
  EXPECT_TRUE(testing::throws_with<FileError>(
      [&] { MetricsFile(folder.path(), {.iteration = 1}); },
      "metrics.jsonl' cannot be written: Too many levels of symbolic links"));
  EXPECT_FALSE(std::filesystem::exists(folder.path() / "nothing"));
}

TEST(MetricsFile, WhatCannotBeWrittenIsNamedWithItsCause) {
  const testing::TemporaryFolder folder;
  // The path has room for the name of the file, but not for the name of the file put aside.
  constexpr size_t kLongestPath = 4095, kStretch = 200;
  std::string deep = folder.path();
  const size_t length = kLongestPath - std::string("/metrics.jsonl").size();
  while (deep.size() < length)
    deep += "/" + std::string(std::min(kStretch, length - deep.size() - 1), 'x');
  MetricsFile(deep).write("first");
  EXPECT_TRUE(testing::throws_with<FileError>([&] { MetricsFile file(deep); },
                                              "metrics.jsonl' cannot be renamed to '" + deep));
  EXPECT_TRUE(testing::throws_with<FileError>([&] { MetricsFile file(deep); },
                                              "metrics.previous.jsonl': File name too long"));
  EXPECT_EQ(std::filesystem::file_size(deep + "/metrics.jsonl"), 6U);
}

TEST(MetricsFile, NoFileOfAnotherRunIsReplaced) {
  const testing::TemporaryFolder folder;
  for (const char* line : {"first", "second", "third"}) MetricsFile(folder.path()).write(line);
  folder.write("metrics.previous.11.jsonl", "eleventh");
  EXPECT_EQ(MetricsFile(folder.path()).note(), "the metrics of an earlier run are in '" +
                                                   folder.path().string() +
                                                   "/metrics.previous.12.jsonl'");
  EXPECT_EQ(MetricsFile(folder.path()).note(), "") << "it had no line";
  EXPECT_EQ(folder.read("metrics.previous.jsonl"), "first\n");
  EXPECT_EQ(folder.read("metrics.previous.2.jsonl"), "second\n");
  EXPECT_EQ(folder.read("metrics.previous.11.jsonl"), "eleventh");
  EXPECT_EQ(folder.read("metrics.previous.12.jsonl"), "third\n");
}

TEST(MetricsFile, ARunKnowsItsLinesByThatOfItsCheckpoint) {
  const testing::TemporaryFolder folder;
  const auto line = [](int64_t iteration, double ms) {
    return to_json(IterationMetrics{.iteration = iteration, .iteration_ms = ms});
  };
  const std::string own = line(1, 1) + "\n" + line(2, 1) + "\n", more = line(3, 1) + "\n";
  const std::string foreign = line(1, 2) + "\n" + line(2, 2) + "\n" + line(3, 2) + "\n";
  const MetricsResume resume = {.iteration = 2, .checksum = checksum_of_line(line(2, 1))};
  const auto go_on = [&] {
    MetricsFile file(folder.path(), resume);
    file.write("next");
    return file.note();
  };
  folder.write("metrics.jsonl", own + more);
  EXPECT_EQ(go_on(), "");
  EXPECT_EQ(folder.read("metrics.jsonl"), own + "next\n");
  // metrics.jsonl is of another run. The run's own lines and those of an earlier one are put aside.
  folder.write("metrics.previous.jsonl", own + more);
  folder.write("metrics.previous.2.jsonl", foreign);
  folder.write("metrics.jsonl", foreign + "{\"iterat");
  EXPECT_TRUE(go_on().ends_with("metrics.jsonl' was from another run and is now '" +
                                folder.path().string() + "/metrics.previous.3.jsonl'"));
  EXPECT_EQ(folder.read("metrics.jsonl"), own + "next\n");
  EXPECT_EQ(folder.read("metrics.previous.jsonl"), own + more);
  EXPECT_EQ(folder.read("metrics.previous.2.jsonl"), foreign);
  EXPECT_EQ(folder.read("metrics.previous.3.jsonl"), foreign + "{\"iterat");
  // A kill between those two renames left no metrics.jsonl.
  std::filesystem::remove(folder.path() / "metrics.jsonl");
  EXPECT_EQ(go_on(), "");
  EXPECT_EQ(folder.read("metrics.jsonl"), own + "next\n");
  // The lines until iteration 2 are nowhere.
  std::filesystem::remove(folder.path() / "metrics.previous.jsonl");
  folder.write("metrics.jsonl", line(1, 1) + "\n");
  EXPECT_TRUE(
      go_on().ends_with("/metrics.previous.4.jsonl'; the lines up to iteration 2 are missing"));
  EXPECT_EQ(folder.read("metrics.jsonl"), "next\n");
}

/// A run that began with another run's checkpoint, after iteration 2.
TEST(MetricsFile, ARunThatGoesBackKnowsItsOwnLines) {
  const testing::TemporaryFolder folder;
  const auto line = [](int64_t iteration, double ms) {
    return to_json(IterationMetrics{.iteration = iteration, .iteration_ms = ms});
  };
  const MetricsResume resume = {.iteration = 2, .checksum = checksum_of_line(line(2, 1))};
  MetricsFile file(folder.path(), resume);
  EXPECT_EQ(file.note(), "");
  for (const int64_t iteration : {3, 4, 5}) file.write(line(iteration, 1));
  file.go_back(4);
  file.write(line(5, 2));
  EXPECT_EQ(folder.read("metrics.jsonl"),
            line(3, 1) + "\n" + line(4, 1) + "\n" + line(5, 2) + "\n");
  file.go_back(2);
  EXPECT_EQ(folder.read("metrics.jsonl"), "");
  file.write(line(3, 3));
  file.sync();
  EXPECT_EQ(folder.read("metrics.jsonl"), line(3, 3) + "\n");
  EXPECT_FALSE(std::filesystem::exists(folder.path() / "metrics.previous.jsonl"));
  std::filesystem::remove(folder.path() / "metrics.jsonl");
  file.go_back(2);
  file.write(line(3, 4));
  EXPECT_EQ(folder.read("metrics.jsonl"), line(3, 4) + "\n");
  // A later start cannot know them, and loses none.
  const std::string note = MetricsFile(folder.path(), resume).note();
  EXPECT_TRUE(
      note.ends_with("metrics.jsonl' was from an earlier start at iteration 2 and is now '" +
                     folder.path().string() + "/metrics.previous.jsonl'"))
      << note;
  EXPECT_EQ(folder.read("metrics.previous.jsonl"), line(3, 4) + "\n");
}

TEST(MetricsFile, AResumedRunAppendsAfterItsCheckpoint) {
  const testing::TemporaryFolder folder;
  const std::string one = to_json(IterationMetrics{.iteration = 1}) + "\n";
  const std::string two = to_json(ValidationMetrics{2, 2.5, 12.25}) + "\n";
  const std::string three = to_json(IterationMetrics{.iteration = 3}) + "\n";
  folder.write("metrics.jsonl", one + two + three + "{\"iteration\":2,\"lm_l");
  MetricsFile(folder.path(), {.iteration = 2}).write("next");
  EXPECT_EQ(folder.read("metrics.jsonl"), one + two + "next\n");
  EXPECT_FALSE(std::filesystem::exists(folder.path() / "metrics.previous.jsonl"));
  // A line that lacks only its newline is torn too.
  folder.write("metrics.jsonl", one + two.substr(0, two.size() - 1));
  MetricsFile(folder.path(), {.iteration = 5}).write("next");
  EXPECT_EQ(folder.read("metrics.jsonl"), one + "next\n");
}

TEST(Progress, LineAndDurations) {
  EXPECT_EQ(progress_line(example(), {600, int64_t{412} << 20, 42.4}),
            "iteration 120/600 | loss 0.3000 | grad norm 1.500 | lr 3.000e-04 | 41.0k tokens/s | "
            "412 MiB | 0:42 left");
  IterationMetrics two_rates = example();
  two_rates.decoupled_learning_rate = 0.5;
  EXPECT_NE(progress_line(two_rates, {600, 0, 0}).find("| lr 3.000e-04 (embeddings 5.000e-01) |"),
            std::string::npos);
  IterationMetrics overflow = example();
  overflow.lm_loss = std::numeric_limits<double>::infinity();
  overflow.grad_norm = -std::numeric_limits<double>::quiet_NaN();
  EXPECT_NE(progress_line(overflow, {600, 0, 0}).find("| loss inf | grad norm nan |"),
            std::string::npos);
  const auto told_of_skip = [](double norm, Spike spike) {
    IterationMetrics skipped = example();
    skipped.skipped = true;
    skipped.grad_norm = norm;
    skipped.spike = spike;
    const std::string line = progress_line(skipped, {600, 0, 0});
    return line.substr(line.find("left | ") + 7);
  };
  EXPECT_EQ(told_of_skip(std::numeric_limits<double>::infinity(), Spike::none),
            "SKIPPED: the gradient is not finite");
  EXPECT_EQ(told_of_skip(15, Spike::none),
            "SKIPPED: the gradient norm is above optimizer.grad_norm_skip_threshold");
  EXPECT_EQ(told_of_skip(15, Spike::loss), "SKIPPED: the loss is a spike");
  EXPECT_EQ(told_of_skip(15, Spike::grad_norm), "SKIPPED: the gradient norm is a spike");
  EXPECT_EQ(format_duration(3725), "1:02:05");
  EXPECT_EQ(format_duration(59.6), "1:00");
}

TEST(Progress, PlainLinesAtIntervalsAndForWhatIsUnusual) {
  std::ostringstream out;
  ProgressDisplay display(out, nullptr, 25, 10);
  for (int64_t i = 1; i <= 25; ++i) {
    IterationMetrics metrics = example();
    metrics.iteration = i;
    metrics.skipped = i == 13;
    display.iteration(metrics, 0);
  }
  display.validation({25, 2, 7.4});
  std::vector<std::string> starts;
  std::istringstream lines(out.str());
  for (std::string line; std::getline(lines, line);) starts.push_back(line.substr(0, 15));
  EXPECT_EQ(starts,
            (std::vector<std::string>{"iteration  1/25", "iteration 10/25", "iteration 13/25",
                                      "iteration 20/25", "iteration 25/25", "iteration 25 | "}));
  EXPECT_EQ(out.str().find('\r'), std::string::npos);
}

TEST(Progress, ATerminalShowsOneLineThatIsWrittenOver) {
  std::ostringstream out;
  int columns = 200;
  ProgressDisplay display(
      out, [&] { return columns; }, 25, 10);
  display.iteration(example(), 0);
  display.iteration(example(), 0);
  EXPECT_EQ(out.str().find('\n'), std::string::npos);
  display.message("done");
  EXPECT_TRUE(out.str().ends_with("left\ndone\n"));
  for (columns = 10; columns < 130; ++columns) {
    out.str("");
    display.iteration(example(), 0);
    const std::string line = out.str().substr(std::string("\r\x1b[K").size());
    EXPECT_LT(static_cast<int>(line.size()), columns);  // a longer line would scroll
    EXPECT_TRUE(columns < 80 || line.ends_with(" left")) << line;
  }
}

TEST(Progress, ALaterStartShowsItsFirstIteration) {
  std::ostringstream out;
  ProgressDisplay display(out, nullptr, 25, 10);
  for (int64_t i = 13; i <= 20; ++i) {
    IterationMetrics metrics = example();
    metrics.iteration = i;
    display.iteration(metrics, 0);
  }
  EXPECT_TRUE(out.str().starts_with("iteration 13/25 | ")) << out.str();
  EXPECT_NE(out.str().find("\niteration 20/25 | "), std::string::npos) << out.str();
}

TEST(Progress, TheFirstIterationDoesNotSpoilTheTimeThatIsLeft) {
  std::ostringstream out;
  ProgressDisplay display(out, nullptr, 1000, 10);
  for (int64_t i = 1; i <= 10; ++i) {
    IterationMetrics metrics = example();
    metrics.iteration = i;
    metrics.iteration_ms = i == 1 ? 20000 : 500;
    display.iteration(metrics, 0);
  }
  EXPECT_TRUE(out.str().ends_with("| 8:15 left\n")) << out.str();
}

}  // namespace
}  // namespace lockstep
