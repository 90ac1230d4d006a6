#include "lockstep/parallel_state/collective_ledger.h"

#include <gtest/gtest.h>

#include "lockstep/parallel_state/reduction.h"

namespace lockstep {
namespace {

using Kind = CollectiveOperation::Kind;

void add(CollectiveLedger& ledger, const char* label, int64_t numel = 4, int64_t step = 1) {
  ledger.add(step, {Kind::all_reduce, ReduceOp::sum}, label, numel, "Float");
}

RankAccount account(int64_t rank, const CollectiveLedger& ledger) {
  return {.rank = rank, .answered = true, .entries = ledger.entries(), .elsewhere = ""};
}

TEST(CollectiveLedger, CountsAndFingerprintsWhatWasDone) {
  CollectiveLedger a, b;
  EXPECT_EQ(a.state(), (CollectiveLedger::State{0, 0}));
  add(a, "bucket 0");
  add(b, "bucket 0", 4, /*step=*/9);
  EXPECT_EQ(a.state().sequence, 1);
  EXPECT_EQ(a.state(), b.state()) << "the step is no part of the fingerprint";
  add(a, "bucket 1");
  add(b, "bucket 2");
  EXPECT_EQ(a.state().sequence, b.state().sequence);
  EXPECT_NE(a.state().fingerprint, b.state().fingerprint);
}

// Ranks of another build compare the identity too. Computed independently, as FNV-1a of each text
// and a zero byte, and of the number at once.
TEST(CollectiveLedger, TheIdentityOfACallIsTheSameInEveryBuild) {
  EXPECT_EQ(identity_of_call("all_reduce (sum)", "bucket 0", 12, "Float"), 0x743b64bae17454cbU);
  EXPECT_EQ(identity_of_call({Kind::all_reduce, ReduceOp::sum}, "bucket 0", 12, "Float"),
            0x743b64bae17454cbU);
}

/// Each operation and its text.
const std::vector<std::pair<CollectiveOperation, std::string>>& texts_of_operations() {
  static const std::vector<std::pair<CollectiveOperation, std::string>> texts = {
      {{Kind::all_reduce, ReduceOp::sum}, "all_reduce (sum)"},
      {{Kind::all_reduce, ReduceOp::average}, "all_reduce (average)"},
      {{Kind::reduce_scatter, ReduceOp::max}, "reduce_scatter (max)"},
      {{Kind::reduce_scatter, ReduceOp::min}, "reduce_scatter (min)"},
      {{Kind::all_gather}, "all_gather"},
      {{Kind::all_to_all}, "all_to_all"},
      {{.kind = Kind::broadcast, .position = 0}, "broadcast (from 0)"},
      {{.kind = Kind::broadcast, .position = -1}, "broadcast (from -1)"},
      {{.kind = Kind::send, .position = 12}, "send (to 12)"},
      {{.kind = Kind::receive, .position = INT64_MIN}, "receive (from -9223372036854775808)"},
      {{.kind = Kind::exchange, .position = 1, .source = 3}, "exchange (to 1, from 3)"},
      {{Kind::comparison}, "comparison"},
      {{Kind::scatter_to_group}, "scatter_to_group"},
      {{Kind::gather_from_group}, "gather_from_group"},
      {{Kind::reduce_scatter_to_group}, "reduce_scatter_to_group"},
      {{Kind::all_to_all_rows}, "all_to_all_rows"},
      {{Kind::all_to_all_dims}, "all_to_all_dims"}};
  return texts;
}

TEST(CollectiveOperation, IsShownAsText) {
  for (const auto& [operation, text] : texts_of_operations()) EXPECT_EQ(to_string(operation), text);
}

TEST(CollectiveOperation, HasTheIdentityOfItsText) {
  for (const auto& [operation, text] : texts_of_operations())
    EXPECT_EQ(identity_of_call(operation, "a label", 3, "Half"),
              identity_of_call(text, "a label", 3, "Half"))
        << text;
}

TEST(CollectiveLedger, EveryPartOfACallCounts) {
  const auto fingerprint = [](const CollectiveOperation& operation, const char* label,
                              int64_t numel, const char* dtype) {
    CollectiveLedger ledger;
    ledger.add(1, operation, label, numel, dtype);
    return ledger.state().fingerprint;
  };
  const CollectiveOperation sum = {Kind::all_reduce, ReduceOp::sum};
  const uint64_t reference = fingerprint(sum, "bucket", 4, "Float");
  EXPECT_NE(reference, fingerprint({Kind::all_gather}, "bucket", 4, "Float"));
  EXPECT_NE(reference, fingerprint({Kind::all_reduce, ReduceOp::max}, "bucket", 4, "Float"));
  EXPECT_NE(reference, fingerprint(sum, "tokens", 4, "Float"));
  EXPECT_NE(reference, fingerprint(sum, "bucket", 5, "Float"));
  EXPECT_NE(reference, fingerprint(sum, "bucket", 4, "Double"));
  EXPECT_NE(fingerprint({.kind = Kind::broadcast, .position = 0}, "bucket", 4, "Float"),
            fingerprint({.kind = Kind::broadcast, .position = 1}, "bucket", 4, "Float"));
  EXPECT_NE(identity_of_call("ab", "c", 4, "Float"), identity_of_call("a", "bc", 4, "Float"));
}

TEST(CollectiveLedger, CallsOfOneLabelShareItsText) {
  CollectiveLedger ledger;
  const auto label_of = [&](std::string text) {
    SharedLabel label = ledger.add(1, {Kind::all_reduce, ReduceOp::sum}, text, 4, "Float").label;
    text.assign(text.size(), '?');
    return label;
  };
  const SharedLabel first = label_of("bucket 0");
  EXPECT_EQ(*first, "bucket 0") << "the caller's text may go";
  EXPECT_EQ(label_of("bucket 0"), first);
  EXPECT_EQ(ledger.share_label("buck", "et 0"), first);
  EXPECT_EQ(ledger.share_label("", "bucket 0"), first);
  EXPECT_NE(label_of("bucket 1"), first);
  EXPECT_EQ(*ledger.share_label("gradient of ", "bucket 0"), "gradient of bucket 0");
}

TEST(LabelTable, ForgetsLabelsThatNobodyHas) {
  LabelTable table;
  const SharedLabel kept = table.share("", "kept");
  const auto* const text = kept.get();
  for (size_t i = 0; i < 10 * LabelTable::kMost; ++i) {
    EXPECT_EQ(*table.share("step ", std::to_string(i)), "step " + std::to_string(i));
    ASSERT_LE(table.size(), LabelTable::kMost);
  }
  EXPECT_EQ(table.share("ke", "pt").get(), text);
}

TEST(LabelTable, KeepsAllThatSomebodyHas) {
  LabelTable table;
  std::vector<SharedLabel> held;
  for (size_t i = 0; i < 3 * LabelTable::kMost; ++i)
    held.push_back(table.share("step ", std::to_string(i)));
  for (size_t i = 0; i < held.size(); ++i)
    ASSERT_EQ(table.share("", "step " + std::to_string(i)), held[i]);
  EXPECT_EQ(table.size(), held.size());
}

TEST(CollectiveLedger, KeepsTheLastOnesAndTravelsAsText) {
  CollectiveLedger ledger;
  for (int i = 0; i < 200; ++i) add(ledger, "bucket 3 ('a' to 'b')", i, i / 10);
  const auto entries = CollectiveLedger::parse(ledger.serialize());
  ASSERT_EQ(entries.size(), CollectiveLedger::kKept);
  EXPECT_EQ(entries.front().sequence, 200 - 63);
  EXPECT_EQ(entries.back().sequence, 200);
  EXPECT_EQ(entries.back().to_string(),
            "all_reduce (sum) of bucket 3 ('a' to 'b'), 199 x Float (step 19)");
}

TEST(CollectiveLedger, UnreadableTextIsDropped) {
  EXPECT_TRUE(CollectiveLedger::parse("").empty());
  EXPECT_TRUE(CollectiveLedger::parse("nonsense\n\n\x1f\x1f\n1\x1f").empty());
}

TEST(FirstDifference, RanksThatAgreeHaveNone) {
  CollectiveLedger a, b;
  for (CollectiveLedger* ledger : {&a, &b}) add(*ledger, "bucket 0");
  EXPECT_EQ(first_difference({account(0, a), account(1, b)}), std::nullopt);
  EXPECT_EQ(first_difference({}), std::nullopt);
}

TEST(FirstDifference, SaysWhoDidWhatInstead) {
  CollectiveLedger a, b;
  for (CollectiveLedger* ledger : {&a, &b}) add(*ledger, "bucket 0");
  add(a, "bucket 1", 8, 3);
  add(b, "bucket 2", 6, 3);
  EXPECT_EQ(first_difference({account(0, a), account(5, b)}),
            "the ranks diverge at operation 2 of the group: rank 0: all_reduce (sum) of bucket 1, "
            "8 x Float (step 3); rank 5: all_reduce (sum) of bucket 2, 6 x Float (step 3)");
}

/// One rank has called another operation than all others.
std::vector<RankAccount> accounts_with_outlier(int64_t ranks, int64_t outlier) {
  CollectiveLedger most, other;
  add(most, "bucket 1", 8, 3);
  add(other, "bucket 2", 6, 3);
  std::vector<RankAccount> accounts;
  for (int64_t rank = 0; rank < ranks; ++rank)
    accounts.push_back(account(rank, rank == outlier ? other : most));
  return accounts;
}

TEST(FirstDifference, InALargeGroupRanksThatDidTheSameAreNamedTogether) {
  EXPECT_EQ(first_difference(accounts_with_outlier(1000, 7)),
            "the ranks diverge at operation 1 of the group: 999 ranks (0, 1, ..., 999): "
            "all_reduce (sum) of bucket 1, 8 x Float (step 3); rank 7: all_reduce (sum) of bucket "
            "2, 6 x Float (step 3)");
}

TEST(FirstDifference, InAGroupOfMediumSizeEachRankIsDescribed) {
  const auto difference = first_difference(accounts_with_outlier(64, 60));
  ASSERT_TRUE(difference.has_value());
  EXPECT_NE(difference->find("; rank 60: all_reduce (sum) of bucket 2"), std::string::npos);
  EXPECT_NE(difference->find("; rank 63: all_reduce (sum) of bucket 1"), std::string::npos);
}

TEST(FirstDifference, SaysWhoDidNotCome) {
  CollectiveLedger a, b;
  for (CollectiveLedger* ledger : {&a, &b}) add(*ledger, "bucket 0");
  add(a, "bucket 1", 8, 3);
  RankAccount late = account(1, b);
  late.elsewhere = "waits for broadcast (from 0) of weights over group tp [1, 3]";
  const RankAccount silent{.rank = 2, .answered = false, .entries = {}, .elsewhere = ""};
  EXPECT_EQ(
      first_difference({account(0, a), late}),
      "the ranks diverge at operation 2 of the group: rank 0: all_reduce (sum) of bucket 1, "
      "8 x Float (step 3); rank 1: has not reached it; its last was operation 1: all_reduce "
      "(sum) of bucket 0, 4 x Float (step 1); it waits for broadcast (from 0) of weights over "
      "group tp [1, 3]");
  EXPECT_TRUE(first_difference({account(0, a), silent})->ends_with("rank 2: no answer"));
}

TEST(FirstDifference, LooksOnlyAtWhatAllStillKnow) {
  CollectiveLedger a, b;
  for (int i = 0; i < 100; ++i) add(a, "bucket");
  for (int i = 0; i < 60; ++i) add(b, i == 50 ? "other" : "bucket");
  const auto difference = first_difference({account(0, a), account(1, b)});
  ASSERT_TRUE(difference.has_value());
  EXPECT_TRUE(difference->starts_with("the ranks diverge at operation 51 "));
}

}  // namespace
}  // namespace lockstep
