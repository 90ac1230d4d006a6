// Two hand-written audits compared: what must be the same in two layouts, what may differ, and
// which reports are refused.

#include "lockstep/optimizer/audit_comparison.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "lockstep/core/error.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::throws_with;
using Json = nlohmann::ordered_json;

constexpr const char* kEffect = "every term x 1, divided by all tokens";

/// A table of 12 elements that tp cuts, and a norm of 3 that it does not cut, on `tensor` x `data`
/// ranks.
AuditReport layout(int64_t tensor, int64_t data) {
  AuditReport report = {.world_size = tensor * data,
                        .layout = "tp " + std::to_string(tensor) + ", dp " + std::to_string(data),
                        .scaling = "per-token"};
  for (int64_t rank = 0; rank < report.world_size; ++rank) {
    std::vector<int64_t> replicas, all;
    for (int64_t other = 0; other < report.world_size; ++other) {
      if (other % tensor == rank % tensor) replicas.push_back(other);
      all.push_back(other);
    }
    AuditedParameter table = {.name = "table",
                              .shape = {12 / tensor},
                              .description = "Shard(0) over tp",
                              .reduction = "bucket 1 of 1",
                              .last = 12 / tensor,
                              .terms = {{1, 1, replicas}},
                              .token_ranks = replicas,
                              .counted = true,
                              .update = "adam",
                              .replicas = data,
                              .effect = kEffect};
    AuditedParameter norm = table;
    norm.name = "norm";
    norm.shape = {3};
    norm.description = "partial-sum over tp";
    norm.last = 3;
    norm.terms = {{1, 1, all}};
    norm.copies = tensor;
    norm.counted = rank % tensor == 0;
    report.ranks.push_back(
        {.rank = rank, .norm_elements = 15, .zero_elements = 15, .parameters = {norm, table}});
  }
  return report;
}

using Change = std::function<void(AuditReport&)>;

AuditComparison against_changed(const Change& change) {
  AuditReport b = layout(1, 3);
  change(b);
  return compare_audits(layout(2, 2), b);
}

TEST(AuditComparison, LayoutsThatTrainTheSameAreEquivalent) {
  const AuditComparison found = compare_audits(layout(2, 2), layout(1, 3));
  EXPECT_TRUE(found.equivalent()) << to_text(found);
  EXPECT_EQ(found.parameters, 2);
  std::set<std::string> fields;
  for (const AuditDifference& one : found.layouts) fields.insert(one.field);
  EXPECT_EQ(fields,
            (std::set<std::string>{"world_size", "layout", "shape", "terms", "tokens", "held"}));
  EXPECT_TRUE(to_text(found).ends_with("2 parameters, equivalent\n")) << to_text(found);
  const AuditComparison same = compare_audits(layout(2, 2), layout(2, 2));
  EXPECT_TRUE(same.equivalent());
  EXPECT_TRUE(same.layouts.empty());
}

TEST(AuditComparison, NamesWhatIsTrainedOtherwise) {
  const auto only = [](const AuditComparison& found) {
    EXPECT_EQ(found.differences.size(), 1U) << to_text(found);
    return found.differences.empty() ? AuditDifference{} : found.differences.front();
  };
  const auto table = [](AuditReport& report, size_t rank) -> AuditedParameter& {
    return report.ranks[rank].parameters[1];
  };
  EXPECT_EQ(only(against_changed([&](AuditReport& report) {
              for (size_t r = 0; r < 3; ++r) table(report, r).effect = "every term x 2";
            })),
            (AuditDifference{"table", "gradient", kEffect, "every term x 2"}));
  EXPECT_EQ(only(against_changed([&](AuditReport& report) { table(report, 1).effect = "half"; })),
            (AuditDifference{"table", "gradient", kEffect,
                             std::string(kEffect) + " on ranks [0, 2]; half on ranks [1]"}));
  EXPECT_EQ(only(against_changed([&](AuditReport& report) { table(report, 1).problem = "odd"; })).b,
            std::string(kEffect) + " on ranks [0, 2]; odd on ranks [1]");
  EXPECT_EQ(
      only(against_changed([&](AuditReport& report) { table(report, 1).counted = false; })),
      (AuditDifference{"table", "norm", "counts each element 1 x", "counts each element 2/3 x"}));
  EXPECT_EQ(only(against_changed([&](AuditReport& report) { table(report, 2).update = "sgd"; })).b,
            "adam on ranks [0, 1]; sgd on ranks [2]");
  EXPECT_EQ(only(against_changed([](AuditReport& report) { report.scaling = "average"; })),
            (AuditDifference{"", "scaling", "per-token", "average"}));
  EXPECT_EQ(only(against_changed([](AuditReport& report) { report.ranks[1].norm_elements = 3; })),
            (AuditDifference{"", "elements in the norm", "all elements",
                             "3 of 15 elements on ranks [1]; all elements on ranks [0, 2]"}));
  const AuditComparison renamed = against_changed([&](AuditReport& report) {
    for (size_t r = 0; r < 3; ++r) table(report, r).name = "other";
  });
  ASSERT_EQ(renamed.differences.size(), 2U);
  EXPECT_EQ(renamed.differences[0],
            (AuditDifference{"other", "held", "by no rank", "by ranks [0, 1, 2]"}));
  EXPECT_EQ(renamed.differences[1],
            (AuditDifference{"table", "held", "by ranks [0, 1, 2, 3]", "by no rank"}));
  EXPECT_NE(to_text(renamed).find("table: held\n  A: by ranks [0, 1, 2, 3]\n  B: by no rank\n"),
            std::string::npos);
  EXPECT_TRUE(to_text(renamed).ends_with("3 parameters, not equivalent: 2 differences\n"));
}

// 12 elements, and 16 with 4 of padding. If the padding is not stated, they are different tables.
TEST(AuditComparison, PaddingIsOfTheLayout) {
  const auto padded = [](const std::string& rows_a, const std::string& rows_b) {
    AuditReport a = layout(2, 2), b = layout(1, 3);
    for (AuditedRank& rank : a.ranks) rank.parameters[1].description += rows_a;
    for (AuditedRank& rank : b.ranks) {
      rank.parameters[1].description += rows_b;
      rank.parameters[1].last = 16;
      rank.norm_elements = rank.zero_elements = 19;
    }
    return compare_audits(a, b);
  };
  const std::string eleven = ", 11 rows before padding, embedding or output layer";
  EXPECT_TRUE(padded(eleven, eleven).equivalent());
  EXPECT_EQ(padded("", "").differences.front(), (AuditDifference{"table", "elements", "12", "16"}));
  EXPECT_EQ(
      padded(eleven, ", 10 rows before padding").differences.front(),
      (AuditDifference{"table", "padding", "11 rows before padding", "10 rows before padding"}));
}

// A table on one stage, compared with its two copies on two stages, each with its own name.
TEST(AuditComparison, CopiesOfATiedParameterAreOne) {
  AuditReport one = layout(1, 1), two = layout(1, 1);
  two.world_size = 2;
  AuditedParameter& table = two.ranks[0].parameters[1];
  table.tie = "words";
  table.copies = 2;
  two.ranks.push_back(two.ranks[0]);
  two.ranks[1].rank = 1;
  two.ranks[1].parameters[1].name = "output.table";
  two.ranks[1].parameters[1].counted = false;
  two.ranks[1].parameters.erase(two.ranks[1].parameters.begin());
  const AuditComparison found = compare_audits(one, two);
  EXPECT_TRUE(found.equivalent()) << to_text(found);
  EXPECT_EQ(found.parameters, 2);
  two.ranks[1].parameters[0].counted = true;
  EXPECT_EQ(
      compare_audits(one, two).differences.front(),
      (AuditDifference{"table", "norm", "counts each element 1 x", "counts each element 2 x"}));
}

TEST(AuditComparison, JsonHasBoth) {
  const Json json = Json::parse(
      to_json(against_changed([](AuditReport& report) { report.scaling = "average"; })));
  EXPECT_FALSE(json["equivalent"].get<bool>());
  EXPECT_EQ(json["parameters"], 2);
  EXPECT_EQ(json["differences"],
            Json::parse(R"([{"parameter": "", "field": "scaling", "a": "per-token",
                             "b": "average"}])"));
  EXPECT_EQ(json["layouts"][0]["field"], "world_size");
}

TEST(AuditJson, GoesThereAndBack) {
  const AuditReport report = layout(2, 2);
  EXPECT_EQ(parse_audit_report(to_json(report), "here"), report);
}

TEST(AuditJson, ErrorsNameFileAndField) {
  const auto refuses = [](const std::function<void(Json&)>& change, const std::string& text) {
    Json json = Json::parse(to_json(layout(2, 1)));
    change(json);
    return throws_with<FileError>([&] { (void)parse_audit_report(json.dump(), "a.json"); }, text);
  };
  EXPECT_TRUE(
      refuses([](Json& json) { json.erase("layout"); }, "a.json: no audit: layout: missing"));
  EXPECT_TRUE(refuses([](Json& json) { json["world_size"] = 0; },
                      "a.json: no audit: world_size: found 0, allowed: an integer, >= 1"));
  EXPECT_TRUE(refuses([](Json& json) { json["ranks"] = 3; }, "ranks: found 3, allowed: a list"));
  EXPECT_TRUE(refuses([](Json& json) { json["ranks"][1]["rank"] = 0; },
                      "ranks[1].rank: found 0 twice, allowed: once"));
  EXPECT_TRUE(refuses([](Json& json) { json["ranks"][1]["rank"] = 2; },
                      "ranks[1].rank: found 2, allowed: 0 to 1"));
  EXPECT_TRUE(refuses([](Json& json) { json["ranks"][1]["parameters"][0]["counted"] = "no"; },
                      "ranks[1].parameters[0].counted: found \"no\", allowed: true, false"));
  EXPECT_TRUE(
      refuses([](Json& json) { json["ranks"][0]["parameters"][1]["terms"][0]["denominator"] = 0; },
              "ranks[0].parameters[1].terms[0].denominator: found 0, allowed: an integer, >= 1"));
  EXPECT_TRUE(
      refuses([](Json& json) { json["ranks"][0]["parameters"][1]["terms"][0]["ranks"][1] = 0.5; },
              "terms[0].ranks[1]: found 0.5, allowed: an integer, >= 0"));
  EXPECT_TRUE(refuses([](Json& json) { json["ranks"][0]["parameters"][0] = {1}; },
                      "ranks[0].parameters[0]: found [1], allowed: an object"));
  EXPECT_TRUE(throws_with<FileError>([] { (void)parse_audit_report("{", "a.json"); },
                                     "a.json: no audit: "));
  EXPECT_TRUE(throws_with<FileError>([] { (void)parse_audit_report("[]", "a.json"); },
                                     "a.json: no audit: document: found [], allowed: an object"));
  AuditReport some = layout(2, 1);
  some.ranks.pop_back();
  EXPECT_TRUE(throws_with<UsageError>([&] { (void)compare_audits(layout(2, 1), some, "x", "y"); },
                                      "y: found 1 rank of 2, allowed: all"));
}

}  // namespace
}  // namespace lockstep
