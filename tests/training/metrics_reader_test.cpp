#include "lockstep/training/metrics_reader.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "lockstep/core/error.h"
#include "lockstep/tests/support/temporary_folder.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

std::string metrics_line(int64_t iteration, double loss) {
  return nlohmann::json({{"iteration", iteration},
                         {"lm_loss", loss},
                         {"num_tokens", 100},
                         {"iteration_ms", 250.0}})
             .dump() +
         "\n";
}

std::vector<int64_t> iterations_of(const std::vector<MetricsPoint>& points) {
  std::vector<int64_t> iterations;
  for (const MetricsPoint& point : points) iterations.push_back(point.iteration);
  return iterations;
}

TEST(MetricsReader, ReadsNumbersWithIterationTokensAndSeconds) {
  const testing::TemporaryFolder folder;
  folder.write("metrics.jsonl", metrics_line(1, 5.5) + metrics_line(2, 4.5) +
                                    R"({"iteration":2,"validation_loss":4.75,"perplexity":115})"
                                    "\n");
  const RunMetrics metrics =
      read_run_metrics(folder.path(), {"lm_loss", "validation_loss", "no_such"});
  const auto& loss = metrics.of("lm_loss");
  ASSERT_EQ(loss.size(), 2);
  EXPECT_EQ(loss[1].iteration, 2);
  EXPECT_EQ(loss[1].tokens, 200);
  EXPECT_EQ(loss[1].seconds, 0.5);
  EXPECT_EQ(loss[1].value, 4.5);
  ASSERT_EQ(metrics.of("validation_loss").size(), 1);
  EXPECT_EQ(metrics.of("validation_loss")[0].tokens, 200);
  EXPECT_TRUE(metrics.of("no_such").empty());
  EXPECT_EQ(metrics.last_iteration, 2);
  EXPECT_EQ(metrics.iterations, 2);
}

TEST(MetricsReader, ATestIsNoIteration) {
  const testing::TemporaryFolder folder;
  folder.write("metrics.jsonl", metrics_line(1, 5.5) + metrics_line(2, 4.5) +
                                    R"({"iteration":2,"test_loss":4.75,"test_perplexity":115})"
                                    "\n");
  const RunMetrics metrics = read_run_metrics(folder.path(), {"lm_loss", "test_loss"});
  EXPECT_EQ(metrics.of("lm_loss").size(), 2);
  ASSERT_EQ(metrics.of("test_loss").size(), 1);
  EXPECT_EQ(metrics.of("test_loss")[0].tokens, 200);
  EXPECT_EQ(metrics.iterations, 2);
}

TEST(MetricsReader, FieldsInsideObjectsAndKeysWithDots) {
  const testing::TemporaryFolder folder;
  const std::string path = folder.write(
      "m", R"({"iteration":1,"time_ms":{"forward":3.5,"a":{"b":1}},"x.y":7,"x":{"y":8},)"
           R"("skipped":true,"name":"text","list":[1]})"
           "\n");
  const RunMetrics metrics =
      read_run_metrics(path, {"time_ms.forward", "time_ms.a.b", "x.y", "skipped", "name", "list"});
  EXPECT_EQ(metrics.of("time_ms.forward").at(0).value, 3.5);
  EXPECT_EQ(metrics.of("time_ms.a.b").at(0).value, 1);
  EXPECT_EQ(metrics.of("x.y").at(0).value, 7);
  EXPECT_EQ(metrics.of("skipped").at(0).value, 1);
  EXPECT_TRUE(metrics.of("name").empty());
  EXPECT_TRUE(metrics.of("list").empty());
  EXPECT_EQ(numeric_fields(metrics.last_line),
            (std::vector<std::string>{"iteration", "time_ms.forward", "time_ms.a.b", "x.y", "x.y",
                                      "skipped"}));
}

TEST(MetricsReader, NullIsNotANumber) {
  const testing::TemporaryFolder folder;
  const std::string path = folder.write("m", R"({"iteration":1,"lm_loss":null,"num_tokens":null})"
                                             "\n");
  const RunMetrics metrics = read_run_metrics(path, {"lm_loss"});
  ASSERT_EQ(metrics.of("lm_loss").size(), 1);
  EXPECT_TRUE(std::isnan(metrics.of("lm_loss")[0].value));
  EXPECT_EQ(metrics.of("lm_loss")[0].tokens, 0);
}

TEST(MetricsReader, LinesThatAreNotMetricsAreCounted) {
  const testing::TemporaryFolder folder;
  const std::string path = folder.write(
      "m", "\n[1]\n{\"lm_loss\":1}\n{\"iteration\":1.5}\n{\"iteration\":\"1\"}\nNaN\n" +
               std::string("\xFF\xFE\n") + std::string(1, '\0') + "\n" + metrics_line(3, 2));
  const RunMetrics metrics = read_run_metrics(path, {"lm_loss"});
  EXPECT_EQ(metrics.lines_without_metrics, 8);
  EXPECT_EQ(iterations_of(metrics.of("lm_loss")), std::vector<int64_t>{3});
}

TEST(MetricsReader, ATornLastLineWaitsForItsEnd) {
  const testing::TemporaryFolder folder;
  const std::string second = metrics_line(2, 3.0);
  const std::string path = folder.write("m", metrics_line(1, 4.0) + second.substr(0, 9));
  MetricsReader reader(path, {"lm_loss"});
  EXPECT_TRUE(reader.read_more());
  EXPECT_FALSE(reader.read_more());
  EXPECT_EQ(reader.metrics().last_iteration, 1);
  std::ofstream(path, std::ios::app) << second.substr(9, 5);
  EXPECT_FALSE(reader.read_more());
  std::ofstream(path, std::ios::app) << second.substr(14) + metrics_line(3, 2.0);
  EXPECT_TRUE(reader.read_more());
  EXPECT_EQ(iterations_of(reader.metrics().of("lm_loss")), (std::vector<int64_t>{1, 2, 3}));
  EXPECT_EQ(reader.metrics().of("lm_loss")[2].tokens, 300);
  EXPECT_EQ(reader.metrics().lines_without_metrics, 0);
}

TEST(MetricsReader, OfIterationsThatComeAgainTheLaterLinesCount) {
  const testing::TemporaryFolder folder;
  const std::string validation = R"({"iteration":3,"validation_loss":9})"
                                 "\n";
  const std::string path =
      folder.write("m", metrics_line(1, 5) + metrics_line(2, 4) + metrics_line(3, 3) + validation +
                            metrics_line(2, 40) + metrics_line(3, 30));
  const RunMetrics metrics = read_run_metrics(path, {"lm_loss", "validation_loss"});
  const auto& loss = metrics.of("lm_loss");
  ASSERT_EQ(iterations_of(loss), (std::vector<int64_t>{1, 2, 3}));
  EXPECT_EQ(loss[1].value, 40);
  EXPECT_EQ(loss[2].tokens, 300);
  EXPECT_TRUE(metrics.of("validation_loss").empty());
}

TEST(MetricsReader, AFileThatWasReplacedIsReadAnew) {
  const testing::TemporaryFolder folder;
  const std::string path = folder.write("m", metrics_line(1, 5) + metrics_line(2, 4));
  MetricsReader reader(path, {"lm_loss"});
  reader.read_more();
  folder.write("m", metrics_line(1, 50));
  EXPECT_TRUE(reader.read_more());
  EXPECT_EQ(reader.metrics().of("lm_loss").at(0).value, 50);
  folder.write("m", metrics_line(7, 51) + metrics_line(8, 52) + metrics_line(9, 53));
  EXPECT_TRUE(reader.read_more());
  EXPECT_EQ(iterations_of(reader.metrics().of("lm_loss")), (std::vector<int64_t>{7, 8, 9}));
}

TEST(MetricsReader, AnEmptyFileHasNothingAndAMissingOneIsAnError) {
  const testing::TemporaryFolder folder;
  const RunMetrics metrics = read_run_metrics(folder.write("m", ""), {"lm_loss"});
  EXPECT_EQ(metrics.last_iteration, 0);
  EXPECT_THROW(read_run_metrics(folder.path() / "none", {}), FileError);
  std::filesystem::create_directory(folder.path() / "run");
  EXPECT_TRUE(testing::throws_with<FileError>([&] { read_run_metrics(folder.path() / "run", {}); },
                                              "run/metrics.jsonl"));
}

TEST(MetricsReader, LinesThatCrossItsPiecesAreWhole) {
  const testing::TemporaryFolder folder;
  std::string text;
  int64_t count = 0;
  while (text.size() < (size_t{9} << 20)) {
    ++count;
    text += metrics_line(count, 1.0 / count);
  }
  const RunMetrics metrics = read_run_metrics(folder.write("m", text), {"lm_loss"});
  EXPECT_EQ(metrics.lines_without_metrics, 0);
  ASSERT_EQ(static_cast<int64_t>(metrics.of("lm_loss").size()), count);
  EXPECT_EQ(metrics.of("lm_loss").back().value, 1.0 / count);
  EXPECT_EQ(metrics.of("lm_loss").back().tokens, 100.0 * count);
}

}  // namespace
}  // namespace lockstep
