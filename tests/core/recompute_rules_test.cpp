// Which layers are recomputed together, as in Megatron Core 0.16.1; see
// scripts/golden/recomputed_layers.py.

#include "lockstep/core/recompute_rules.h"

#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "lockstep/core/config_io.h"

namespace lockstep {
namespace {

using Pieces = std::vector<int64_t>;

Pieces pieces_of(const std::vector<std::string>& overrides, int64_t num_layers) {
  std::vector<std::string> all = {"model.num_layers=24", "model.recompute_granularity=full"};
  all.insert(all.end(), overrides.begin(), overrides.end());
  return recomputed_pieces(parse_config("", "test", all).model, num_layers);
}

TEST(RecomputeRules, AreThoseOfMegatronCore) {
  std::ifstream file(LOCKSTEP_SOURCE_DIR "/tests/core/recomputed_layers_golden.json");
  const nlohmann::json cases = nlohmann::json::parse(file);
  EXPECT_EQ(cases.size(), 100U);
  for (const auto& json : cases) {
    const std::string method = json[0], count = std::to_string(json[1].get<int64_t>());
    EXPECT_EQ(pieces_of({"model.recompute_method=" + method, "model.recompute_num_layers=" + count},
                        json[2]),
              json[3].get<Pieces>())
        << json;
  }
}

TEST(RecomputeRules, TheLastPieceTakesWhatIsLeft) {
  const std::vector<std::string> uniform = {"model.recompute_method=uniform",
                                            "model.recompute_num_layers=3"};
  EXPECT_EQ(pieces_of(uniform, 7), (Pieces{3, 3, 1}));
  EXPECT_EQ(pieces_of(uniform, 2), Pieces{2});
  EXPECT_EQ(pieces_of(uniform, 0), Pieces{});
}

TEST(RecomputeRules, WithoutANumberAllLayersAreRecomputedOneByOne) {
  for (const char* method : {"block", "uniform"})
    EXPECT_EQ(pieces_of({std::string("model.recompute_method=") + method}, 4),
              (Pieces{1, 1, 1, 1}));
  for (const char* granularity : {"none", "selective"})
    EXPECT_EQ(pieces_of({std::string("model.recompute_granularity=") + granularity}, 4), Pieces{});
}

}  // namespace
}  // namespace lockstep
