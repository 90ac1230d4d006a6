#include "lockstep/training/run_view.h"

#include <gtest/gtest.h>

#include <limits>
#include <nlohmann/json.hpp>

#include "lockstep/training/quantity_text.h"

namespace lockstep {
namespace {

/// Metrics as a run writes them, with everything that a line may have.
RunMetrics watched_metrics(int64_t iterations) {
  RunMetrics metrics;
  for (int64_t i = 1; i <= iterations; ++i) {
    const double loss = 2 + 3.0 / static_cast<double>(i);
    metrics.series["lm_loss"].push_back({i, 0, 0, loss});
    metrics.series["iteration_ms"].push_back({i, 0, 0, 500});
    metrics.series["tokens_per_second"].push_back({i, 0, 0, 35'100});
  }
  metrics.iterations = metrics.last_iteration = iterations;
  metrics.last_line =
      R"({"iteration":120,"lm_loss":2.025,"grad_norm":0.5,"learning_rate":0.0003,"skipped":false,)"
      R"("time_ms":{"forward":100,"backward":200,"communication":50,"optimizer":25,"data":25,)"
      R"("other":100},"model_tflops_per_device":12.34,"utilisation":0.31,)"
      R"("memory_bytes":104857600,"peak_memory_bytes":209715200,)"
      R"("slowest_rank":{"rank":3,"ms":510.5,"in":"forward","behind_ms":10.25}})";
  metrics.last_validation = R"({"iteration":100,"validation_loss":2.51,"perplexity":12.3})";
  return metrics;
}

std::string joined(const std::vector<std::string>& lines) {
  std::string text;
  for (const std::string& line : lines) text += line + "\n";
  return text;
}

TEST(RunView, ShowsWhatTheMetricsHold) {
  const auto lines = run_view({.name = "runs/a", .train_iters = 600, .layout = "tensor 2"},
                              watched_metrics(120), {.columns = 100, .rows = 30, .utf8 = false});
  const std::string text = joined(lines);
  for (const char* part :
       {"runs/a | tensor 2 | iteration 120 of 600, 20 %", "loss 2.0250 | validation 2.5100",
        "grad norm 0.500 | lr 3.000e-04", "35.1k tokens/s | 500.0 ms an iteration | 4:00 left",
        "12.3 TFLOP/s a device | 31.0 % of its peak", "F forward 100.0 ms", "x other 100.0 ms",
        "memory 100 MiB | at most 200 MiB",
        "slowest rank 3 | 510.5 ms | in forward | 10.2 ms behind"})
    EXPECT_NE(text.find(part), text.npos) << part << "\n" << text;
  EXPECT_NE(text.find("[####################....."), text.npos) << text;
  EXPECT_EQ(lines.size(), 30);
}

TEST(RunView, TokensPerSecondAreThoseOfTheTimeThatIterationsTook) {
  RunMetrics metrics = watched_metrics(10);
  for (size_t i = 0; i < 10; ++i) {
    const double seconds = i == 4 ? 5 : 0.5;
    metrics.series["iteration_ms"][i].value = 1000 * seconds;
    metrics.series["tokens_per_second"][i].value = 35'100 / seconds;
  }
  const std::string text =
      joined(run_view({}, metrics, {.columns = 100, .rows = 30, .utf8 = false}));
  EXPECT_NE(text.find("36.9k tokens/s | 950.0 ms an iteration"), text.npos) << text;
}

TEST(RunView, TheTimeBarHasAsManyLettersAsTheSharesSay) {
  const std::string text =
      joined(run_view({}, watched_metrics(2), {.columns = 22, .rows = 60, .utf8 = false}));
  EXPECT_NE(text.find("[FFFFBBBBBBBBCCODxxxx]"), text.npos) << text;
}

TEST(RunView, FitsEverySizeOfTerminal) {
  RunMetrics metrics = watched_metrics(300);
  metrics.series["lm_loss"][7].value = std::numeric_limits<double>::quiet_NaN();
  for (const bool utf8 : {false, true})
    for (const int columns : {1, 2, 10, 17, 20, 40, 80, 132, 300})
      for (const int rows : {1, 2, 5, 10, 24, 80}) {
        const auto lines = run_view({.name = "ein längerer Name", .train_iters = 301}, metrics,
                                    {.columns = columns, .rows = rows, .utf8 = utf8});
        EXPECT_LE(static_cast<int>(lines.size()), rows);
        EXPECT_GE(lines.size(), 1);
        for (const std::string& line : lines) {
          EXPECT_LE(static_cast<int>(utf8_length(line)), columns) << line;
          if (!utf8) {
            EXPECT_TRUE(std::all_of(line.begin(), line.end(), [](char c) {
              return c >= ' ' && c <= '~';
            })) << line;
          }
        }
      }
}

TEST(RunView, LeavesOutWhatIsNotThere) {
  RunMetrics metrics = watched_metrics(3);
  metrics.last_line =
      R"({"iteration":3,"lm_loss":null,"skipped":"x","time_ms":7,"slowest_rank":[]})";
  metrics.last_validation.clear();
  const std::string text = joined(run_view({.name = "r"}, metrics, {.columns = 80, .rows = 9}));
  EXPECT_NE(text.find("iteration 3\n"), text.npos) << text;
  EXPECT_NE(text.find("loss is not a number\n"), text.npos) << text;
  for (const char* part : {"left", "memory", "slowest", "forward", "validation"})
    EXPECT_EQ(text.find(part), text.npos) << part << "\n" << text;
  EXPECT_EQ(joined(run_view({.name = "r"}, {}, {})), "r | no iteration yet\n");
}

TEST(TerminalCurve, DrawsTheCurveBetweenItsMarks) {
  std::vector<CurvePoint> falling;
  for (int i = 0; i <= 10; ++i) falling.push_back({static_cast<double>(i), 100.0 - 10 * i});
  EXPECT_EQ(joined(terminal_curve(falling, 16, 11, /*utf8=*/false)),
            "100 +**\n"
            "    | **\n"
            "    |  **\n"
            "    |   **\n"
            "    |    **\n"
            " 50 +     **\n"
            "    |      **\n"
            "    |       **\n"
            "    |        **\n"
            "    |         **\n"
            "  0 +          *\n");
}

TEST(TerminalCurve, ConnectsPointsThatAreFarApartAndLeavesGaps) {
  const double gap = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(joined(terminal_curve({{0, 0}, {11, 0}, {12, gap}, {13, gap}, {14, 0}, {14, 10}}, 20, 3,
                                  /*utf8=*/false)),
            "10 +               *\n"
            "   |               *\n"
            " 0 +*************  *\n");
}

TEST(TerminalCurve, BrailleHasEightDotsACharacter) {
  const std::vector<CurvePoint> flat = {{0, 1}, {1, 1}};
  const auto rows = terminal_curve({{0, 0}, {1, 1}}, 20, 4, /*utf8=*/true);
  ASSERT_EQ(rows.size(), 4);
  EXPECT_TRUE(rows[0].ends_with("⠚")) << rows[0];       // with the dot in the top right corner
  EXPECT_TRUE(rows[3].starts_with("0 ┤⣀")) << rows[3];  // and in the bottom left one
  EXPECT_TRUE(terminal_curve(flat, 15, 4, true).empty());
  EXPECT_TRUE(terminal_curve(flat, 20, 2, true).empty());
  EXPECT_TRUE(terminal_curve({}, 20, 4, true).empty());
  EXPECT_EQ(terminal_curve(flat, 20, 4, true).size(), 4);
}

TEST(TerminalLine, CutsBetweenCharactersAndDropsControls) {
  EXPECT_EQ(terminal_line("größe", 4, true), "größ");
  EXPECT_EQ(terminal_line("größe", 4, false), "gr??");
  EXPECT_EQ(terminal_line("a\x1b[31mb\tc", 20, true), "a[31mbc");
  EXPECT_EQ(terminal_line("x\xFFy\xE2\x82", 20, true), "x?y?");
  EXPECT_EQ(terminal_line("abc", 0, true), "");
}

TEST(TerminalShares, SmallPartsAndWrongSums) {
  EXPECT_EQ(terminal_shares({{'a', 0.5}, {'b', 0.25}}, 8), "aaaabb..");
  EXPECT_EQ(terminal_shares({{'a', 0.9}, {'b', 0.9}}, 4), "aaaa");
  EXPECT_EQ(terminal_shares({{'a', -1}, {'b', 0.01}}, 4), "....");
  EXPECT_EQ(terminal_shares({}, 0), "");
}

}  // namespace
}  // namespace lockstep
