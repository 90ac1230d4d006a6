// Machine files: their meaning, refusals, and reading back what was written.

#include "lockstep/planner/machine.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "lockstep/core/error.h"

namespace lockstep {
namespace {

using Kind = CollectiveOperation::Kind;

constexpr const char* kMachine =
    "name: \"m\" ranks_per_host: 4 half_tflops: 100 wide_tflops: 10 memory_gb_per_s: 1000\n"
    "matrix_efficiency { from: 16 share: 0.8 } matrix_efficiency { from: 0 share: 0.5 }\n"
    "memory_efficiency { from: 0 share: 0.5 } memory_efficiency { from: 10 share: 0.9 }\n"
    "inside_host { gb_per_s: 300 efficiency: 0.5 latency_us: 2 }\n"
    "between_hosts { gb_per_s: 25 efficiency: 0.8 latency_us: 5 occupancy: 0.1 }\n";

TEST(MachineFile, SharesAreThoseThatTheWorkReaches) {
  const Machine machine = parse_machine(kMachine, "m");
  EXPECT_EQ(machine.name, "m");
  EXPECT_EQ(machine.ranks_per_host, 4);
  const auto seconds = [&](const char* dtype, double flops, int64_t bytes) {
    return machine.seconds({.name = "x", .dtype = dtype, .flops = flops, .bytes = bytes});
  };
  EXPECT_DOUBLE_EQ(seconds("BFloat16", 1.6e10, 0), 1.6e10 / (1e14 * 0.8));
  EXPECT_DOUBLE_EQ(seconds("BFloat16", 1.5e10, 0), 1.5e10 / (1e14 * 0.5));
  EXPECT_DOUBLE_EQ(seconds("Float", 1.6e10, 0), 1.6e10 / (1e13 * 0.8));
  EXPECT_DOUBLE_EQ(seconds("Float8_e4m3fn", 1.6e10, 0), 1.6e10 / (1e14 * 0.8));
  const Machine narrow = parse_machine(std::string(kMachine) + "fp8_tflops: 200\n", "m");
  EXPECT_DOUBLE_EQ(narrow.peak_of("Float8_e5m2"), 2e14);
  EXPECT_DOUBLE_EQ(narrow.peak_of("Half"), 1e14);
  const Machine own = parse_machine(std::string(kMachine) +
                                        "fp8_tflops: 200\n"
                                        "fp8_matrix_efficiency { from: 0 share: 0.3 }\n",
                                    "m");
  const auto of = [&](const char* dtype) {
    return own.seconds({.name = "x", .dtype = dtype, .flops = 1.6e10, .bytes = 0});
  };
  EXPECT_DOUBLE_EQ(of("Float8_e5m2"), 1.6e10 / (2e14 * 0.3));
  EXPECT_DOUBLE_EQ(of("BFloat16"), 1.6e10 / (1e14 * 0.8));
  EXPECT_DOUBLE_EQ(seconds("Float", 0, 20'000'000), 2e7 / (1e12 * 0.9));
  EXPECT_DOUBLE_EQ(seconds("Float", 0, 9'000'000), 9e6 / (1e12 * 0.5));
  EXPECT_DOUBLE_EQ(machine.inside_host.bytes_per_s, 1.5e11);
  EXPECT_DOUBLE_EQ(machine.between_hosts.latency_s, 5e-6);
}

TEST(MachineFile, FusedAttentionHasARateOfItsOwn) {
  const Machine machine =
      parse_machine(std::string(kMachine) + "attention_efficiency: 0.25\n", "m");
  const auto seconds = [&](const char* name, const char* dtype, double flops, int64_t bytes) {
    return machine.seconds({.name = name, .dtype = dtype, .flops = flops, .bytes = bytes});
  };
  const std::string forward = "aten::_scaled_dot_product_flash_attention";
  for (const std::string& name : {forward, forward + "_backward"}) {
    EXPECT_DOUBLE_EQ(seconds(name.c_str(), "BFloat16", 1.6e10, 9'000'000), 1.6e10 / (1e14 * 0.25));
    EXPECT_DOUBLE_EQ(seconds(name.c_str(), "Float", 1.6e10, 9'000'000), 1.6e10 / (1e13 * 0.25));
    EXPECT_DOUBLE_EQ(seconds(name.c_str(), "BFloat16", 1e6, 9'000'000), 9e6 / (1e12 * 0.5));
  }
  EXPECT_DOUBLE_EQ(seconds("aten::bmm", "BFloat16", 1.6e10, 9'000'000),
                   1.6e10 / (1e14 * 0.8) + 9e6 / (1e12 * 0.5));
  Machine measured = machine;
  measured.operators = {{.name = forward, .points = {{1e9, 1e-3}}}};
  EXPECT_DOUBLE_EQ(
      measured.seconds({.name = forward, .dtype = "BFloat16", .flops = 2e9, .bytes = 0}), 2e-3);
}

void expect_refused(const std::string& text, const std::string& told) {
  try {
    parse_machine(text, "file");
    ADD_FAILURE() << told;
  } catch (const ConfigError& error) {
    EXPECT_NE(std::string(error.what()).find(told), std::string::npos) << error.what();
  }
}

TEST(MachineFile, WhatIsMissingOrWrongIsNamed) {
  const auto with = [](const std::string& part, const std::string& other) {
    std::string text = kMachine;
    return text.replace(text.find(part), part.size(), other);
  };
  expect_refused("nonsense", "file:1:");
  expect_refused(with("ranks_per_host: 4", ""), "ranks_per_host: found 0, allowed: >= 1");
  expect_refused(with("half_tflops: 100", ""), "half_tflops is missing");
  expect_refused(with("half_tflops: 100", "half_tflops: -1"), "half_tflops: found -1");
  expect_refused(std::string(kMachine) + "fp8_tflops: 0", "fp8_tflops: found 0");
  expect_refused(with("efficiency: 0.8", "efficiency: 1.2"),
                 "between_hosts.efficiency: found 1.2, allowed: up to 1");
  expect_refused(with("memory_efficiency { from: 0 share: 0.5 }", ""),
                 "memory_efficiency: found 10 as the least `from`, allowed: one that is 0");
  expect_refused(with("memory_efficiency { from: 0 share: 0.5 }",
                      "memory_efficiency { from: 10 "
                      "share: 0.5 }"),
                 "memory_efficiency: found 10 as the least `from`");
  expect_refused(std::string(kMachine) + "memory_efficiency { share: 0.7 }",
                 "memory_efficiency.from: found 0 twice, allowed: once");
  expect_refused(with("half_tflops: 100", "half_tflops: 1e-320"),
                 "half_tflops: found 1e-320, allowed: 1e-100 or more");
  expect_refused(with("wide_tflops: 10", "wide_tflops: 1e300"),
                 "wide_tflops: found 1e+300, allowed: up to 1e+100");
}

constexpr const char* kMeasured =
    "launch_us: 3 synchronous: true\n"
    "operator { name: \"aten::mm\" dtype: \"Float\" point { work: 1e6 us: 10 }\n"
    "  point { work: 4e6 us: 90 } }\n"
    "operator { name: \"swiglu\" point { work: 1000 us: 2 } }\n";

TEST(MachineFile, MeasuredOperatorsTakeWhatWasMeasured) {
  const Machine machine = parse_machine(std::string(kMachine) + kMeasured, "m");
  EXPECT_DOUBLE_EQ(machine.launch_s, 3e-6);
  EXPECT_TRUE(machine.synchronous);
  const auto product = [&](double flops, const char* dtype = "Float") {
    return machine.seconds({.name = "aten::mm", .dtype = dtype, .flops = flops, .bytes = 400});
  };
  EXPECT_DOUBLE_EQ(product(1e6), 10e-6);
  EXPECT_NEAR(product(2e6), 30e-6, 1e-18);  // sqrt(10 * 90): halfway between the logarithms
  EXPECT_DOUBLE_EQ(product(5e5), 5e-6);
  EXPECT_DOUBLE_EQ(product(8e6), 180e-6);
  EXPECT_DOUBLE_EQ(product(1e6, "Double"), 1e6 / (1e13 * 0.5) + 400 / (1e12 * 0.5));
  EXPECT_DOUBLE_EQ(machine.seconds({.name = "swiglu", .dtype = "Half", .bytes = 3000}), 6e-6);
  // Wherever the time of any dtype stands.
  for (const bool first : {true, false}) {
    const std::string any = "operator { name: \"aten::mm\" point { work: 1e6 us: 70 } }\n";
    const Machine both = parse_machine(
        std::string(kMachine) + (first ? any : "") + kMeasured + (first ? "" : any), "m");
    const auto seconds = [&](const char* dtype) {
      return both.seconds({.name = "aten::mm", .dtype = dtype, .flops = 1e6, .bytes = 0});
    };
    EXPECT_DOUBLE_EQ(seconds("Float"), 10e-6);
    EXPECT_DOUBLE_EQ(seconds("Double"), 70e-6);
  }
}

TEST(MachineFile, MeasuredCollectivesTakeWhatWasMeasured) {
  std::string text = kMachine;
  const std::string link = "latency_us: 2 ";
  text.insert(text.find(link) + link.size(),
              "occupancy: 0.5 collective { name: \"all_reduce\" point { work: 100 us: 20 }\n"
              "point { work: 400 us: 50 } } collective { name: \"send\" point { work: 1 us: 7 } }");
  const Machine machine = parse_machine(text, "m");
  const auto transfer = [&](Kind kind, int64_t bytes) {
    return machine.transfer({.operation = {.kind = kind, .position = 1}, .bytes = bytes}, {0, 1},
                            0);
  };
  EXPECT_DOUBLE_EQ(transfer(Kind::all_reduce, 10).seconds, 20e-6);
  EXPECT_NEAR(transfer(Kind::all_reduce, 200).seconds, 30e-6, 1e-18);
  EXPECT_DOUBLE_EQ(transfer(Kind::all_reduce, 400).seconds, 50e-6);
  EXPECT_DOUBLE_EQ(transfer(Kind::all_reduce, 800).seconds, 100e-6);
  EXPECT_DOUBLE_EQ(transfer(Kind::send, 2).seconds, 14e-6);
  EXPECT_DOUBLE_EQ(transfer(Kind::all_reduce, 10).occupancy, 0.5);
  // The steps beyond those of two ranks are added. For 600 bytes each rank sends 800.
  EXPECT_DOUBLE_EQ(
      machine.transfer({.operation = {.kind = Kind::all_reduce}, .bytes = 600}, {0, 1, 2}, 0)
          .seconds,
      100e-6 + (4 - 2) * 2e-6);
  // All-gather was not measured: for 300 bytes the rank sends 300.
  EXPECT_DOUBLE_EQ(transfer(Kind::all_gather, 300).seconds, 2e-6 + 300 / 1.5e11);
}

/// 2 us inside a host of 4 ranks, 5 us between hosts; 0 bytes take only the steps.
TEST(MachineFile, LatencyGrowsWithTheSteps) {
  const Machine machine = parse_machine(kMachine, "m");
  const auto us = [&](Kind kind, const RankList& ranks) {
    const ProgramCall call = {.operation = {.kind = kind, .position = 1}};
    return 1e6 * machine.transfer(call, ranks, 0).seconds;
  };
  const auto of_each = [](int64_t count, int64_t apart) {
    RankList ranks;
    for (int64_t i = 0; i < count; ++i) ranks.push_back(i * apart);
    return ranks;
  };
  const RankList host = of_each(4, 1), two_hosts = of_each(8, 1), one_of_16 = of_each(16, 4),
                 many = of_each(64, 1);
  for (const Kind kind : {Kind::all_gather, Kind::reduce_scatter, Kind::broadcast}) {
    EXPECT_NEAR(us(kind, {0, 1}), 2, 1e-9);
    EXPECT_NEAR(us(kind, host), 3 * 2, 1e-9);
    EXPECT_NEAR(us(kind, two_hosts), 5 + 6 * 2, 1e-9);
    EXPECT_NEAR(us(kind, one_of_16), 15 * 5, 1e-9);
    EXPECT_NEAR(us(kind, many), 15 * 5 + 48 * 2, 1e-9);
  }
  EXPECT_NEAR(us(Kind::all_reduce, host), 2 * 3 * 2, 1e-9);
  EXPECT_NEAR(us(Kind::all_reduce, one_of_16), 2 * 4 * 5, 1e-9);
  EXPECT_NEAR(us(Kind::all_reduce, many), 2 * (4 * 5 + 3 * 2), 1e-9);
  for (const Kind kind : {Kind::send, Kind::exchange, Kind::all_to_all}) {
    EXPECT_NEAR(us(kind, host), 2, 1e-9);
    EXPECT_NEAR(us(kind, one_of_16), 5, 1e-9);
  }
}

/// A rank sends 150 GB/s inside a host and 20 GB/s to others.
TEST(MachineFile, AllToAllsSendToOtherHostsOverLinksOfTheirOwn) {
  Machine machine = parse_machine(kMachine, "m");
  const auto seconds = [&](Kind kind, int64_t bytes, const RankList& ranks) {
    return machine.transfer({.operation = {.kind = kind}, .bytes = bytes}, ranks, 0).seconds;
  };
  const RankList two_hosts = {0, 1, 2, 3, 4, 5, 6, 7};
  // Of 8 GB each rank keeps one, and sends 3 inside and 4 to the other host.
  for (const Kind kind : {Kind::all_to_all, Kind::all_to_all_rows, Kind::all_to_all_dims}) {
    EXPECT_DOUBLE_EQ(seconds(kind, 8'000'000'000, two_hosts), 5e-6 + 4e9 / 2e10);
    EXPECT_DOUBLE_EQ(seconds(kind, 8'000'000'000, {0, 1}), 2e-6 + 4e9 / 1.5e11);
  }
  // A ring passes through all links of a host.
  EXPECT_DOUBLE_EQ(seconds(Kind::reduce_scatter, 8'000'000'000, two_hosts),
                   5e-6 + 6 * 2e-6 + 7e9 / 8e10);
  // The rank that is alone on its host sends all to the other one.
  EXPECT_DOUBLE_EQ(seconds(Kind::all_to_all, 5'000'000'000, {0, 1, 2, 3, 4}), 5e-6 + 4e9 / 2e10);
  EXPECT_DOUBLE_EQ(seconds(Kind::all_to_all, 4'000'000'000, {0, 4, 8, 12}), 5e-6 + 3e9 / 2e10);
  machine.inside_host.bytes_per_s = 1e10;
  EXPECT_DOUBLE_EQ(seconds(Kind::all_to_all, 8'000'000'000, two_hosts), 5e-6 + 3e9 / 1e10);
}

TEST(MachineFile, AMachineOfOneHostRefusesJobsOfSeveral) {
  std::string text = kMachine;
  text.erase(text.find("between_hosts"));
  const Machine machine = parse_machine(text, "m");
  const ProgramCall call = {.operation = {.kind = Kind::all_reduce}, .bytes = 300};
  EXPECT_DOUBLE_EQ(machine.transfer(call, {0, 1, 2}, 0).seconds, 4 * 2e-6 + 400 / 1.5e11);
  EXPECT_THROW(machine.transfer(call, {0, 1, 4}, 0), ConfigError);
  RankList many(4096);
  std::iota(many.begin(), many.end(), 0);
  try {
    machine.transfer(call, many, 0);
    ADD_FAILURE();
  } catch (const ConfigError& error) {
    EXPECT_NE(std::string(error.what()).find("ranks [0, ... 4096 ranks ... 4095] are on several"),
              std::string::npos)
        << error.what();
  }
  EXPECT_EQ(machine_text(machine).find("between_hosts"), std::string::npos);
}

void expect_alike(const std::vector<Machine::Times>& found,
                  const std::vector<Machine::Times>& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); ++i) {
    EXPECT_EQ(found[i].name, expected[i].name);
    EXPECT_EQ(found[i].dtype, expected[i].dtype);
    ASSERT_EQ(found[i].points.size(), expected[i].points.size());
    for (size_t p = 0; p < found[i].points.size(); ++p) {
      EXPECT_DOUBLE_EQ(found[i].points[p].work, expected[i].points[p].work);
      EXPECT_DOUBLE_EQ(found[i].points[p].seconds, expected[i].points[p].seconds);
    }
  }
}

void expect_alike(const Machine::Link& found, const Machine::Link& expected) {
  EXPECT_DOUBLE_EQ(found.bytes_per_s, expected.bytes_per_s);
  EXPECT_DOUBLE_EQ(found.latency_s, expected.latency_s);
  EXPECT_DOUBLE_EQ(found.occupancy, expected.occupancy);
  expect_alike(found.collectives, expected.collectives);
}

void expect_alike(const std::vector<Machine::Efficiency>& found,
                  const std::vector<Machine::Efficiency>& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); ++i) {
    EXPECT_DOUBLE_EQ(found[i].from, expected[i].from);
    EXPECT_DOUBLE_EQ(found[i].share, expected[i].share);
  }
}

TEST(MachineFile, WhatIsWrittenIsReadAgain) {
  const Machine machine = {
      .name = "quotes \" and a\nline",
      .ranks_per_host = 3,
      .cores = 2,
      .half_flops_per_s = 1.2345678901234e11,
      .wide_flops_per_s = 1.0 / 3 * 1e11,
      .fp8_flops_per_s = 2.0 / 3 * 1e11,
      .memory_bytes_per_s = 7.7e9,
      .matrix = {{.from = 16e9, .share = 0.9}, {.from = 0, .share = 0.1}},
      .fp8_matrix = {{.from = 2e9, .share = 0.7}, {.from = 0, .share = 0.2}},
      .memory = {{.from = 0, .share = 1}},
      .attention = 0.6,
      .inside_host = {.bytes_per_s = 3.3e9,
                      .latency_s = 1.7e-5,
                      .occupancy = 0.25,
                      .collectives = {{.name = "exchange", .points = {{64, 1e-6}, {1e9, 0.3}}}}},
      .between_hosts = {.bytes_per_s = 1e8, .latency_s = 1e-4},
      .launch_s = 2.5e-6,
      .synchronous = true,
      .operators = {{.name = "aten::mm", .dtype = "Float", .points = {{1e3, 1e-7}, {1e12, 1.5}}},
                    {.name = "aten::add", .points = {{123, 4e-5}}}}};
  const Machine found = parse_machine(machine_text(machine), "text");
  EXPECT_EQ(found.name, machine.name);
  EXPECT_EQ(found.ranks_per_host, machine.ranks_per_host);
  EXPECT_EQ(found.cores, machine.cores);
  EXPECT_DOUBLE_EQ(found.half_flops_per_s, machine.half_flops_per_s);
  EXPECT_DOUBLE_EQ(found.wide_flops_per_s, machine.wide_flops_per_s);
  EXPECT_DOUBLE_EQ(found.fp8_flops_per_s, machine.fp8_flops_per_s);
  EXPECT_DOUBLE_EQ(found.memory_bytes_per_s, machine.memory_bytes_per_s);
  expect_alike(found.matrix, machine.matrix);
  expect_alike(found.fp8_matrix, machine.fp8_matrix);
  expect_alike(found.memory, machine.memory);
  EXPECT_DOUBLE_EQ(found.attention, machine.attention);
  expect_alike(found.inside_host, machine.inside_host);
  expect_alike(found.between_hosts, machine.between_hosts);
  EXPECT_DOUBLE_EQ(found.launch_s, machine.launch_s);
  EXPECT_EQ(found.synchronous, machine.synchronous);
  expect_alike(found.operators, machine.operators);
}

TEST(MachineFile, MeasurementsThatCannotBeAreNamed) {
  const auto with = [](const std::string& more) { return std::string(kMachine) + more; };
  expect_refused(with("launch_us: -1"), "launch_us: found -1, allowed: a number >= 0");
  for (const char* cores : {"0", "-1", "4", "5"})
    expect_refused(with(std::string("synchronous: true cores: ") + cores),
                   std::string("cores: found ") + cores + ", allowed: 1 to 3, fewer than");
  expect_refused(with("cores: 2"),
                 "cores: found 2, allowed: 1 to 3, fewer than ranks_per_host, "
                 "with synchronous: true");
  std::string alone = with("synchronous: true cores: 1");
  alone.replace(alone.find("ranks_per_host: 4"), 17, "ranks_per_host: 1");
  expect_refused(alone, "cores: found 1, allowed: unset, because ranks_per_host is 1");
  expect_refused(with("operator { point { work: 1 us: 1 } }"), "operator.name is missing");
  expect_refused(with("operator { name: \"x\" }"), "operator \"x\": point is missing");
  expect_refused(with("operator { name: \"x\" point { work: 2 } }"),
                 "operator \"x\": point.us is missing");
  expect_refused(with("operator { name: \"x\" point { work: 2 us: 0 } }"),
                 "operator \"x\": point.us: found 0, allowed: a number > 0");
  expect_refused(with("operator { name: \"x\" point { work: 2 us: 1 } point { work: 2 us: 1 } }"),
                 "operator \"x\": point.work: found 2 after 2, allowed: growing numbers");
  expect_refused(with("operator { name: \"x\" point { work: 2 us: 1 } }\n"
                      "operator { name: \"x\" point { work: 3 us: 1 } }"),
                 "operator \"x\" of dtype \"\": found twice, allowed: once");
  expect_refused(with("operator { name: \"x\" dtype: \"fp32\" point { work: 2 us: 1 } }"),
                 "operator \"x\": dtype: found \"fp32\", allowed: BFloat16, ");
  expect_refused(with("operator { name: \"x\" point { work: 2 us: 1e-320 } }"),
                 "operator \"x\": point.us: found 1e-320, allowed: 1e-100 or more");
  const auto inside = [](const std::string& more) {
    std::string text = kMachine;
    return text.insert(text.find("latency_us: 2 "), more + " ");
  };
  expect_refused(inside("occupancy: 1.5"), "inside_host.occupancy: found 1.5, allowed: up to 1");
  expect_refused(inside("collective { name: \"reduce\" }"),
                 "inside_host.collective.name: found \"reduce\", allowed: all_reduce, ");
  expect_refused(inside("collective { name: \"send\" }"),
                 "inside_host.collective \"send\": point is missing");
  expect_refused(with("matrix_efficiency { from: -1 share: 1 }"),
                 "matrix_efficiency.from: found -1");
  expect_refused(with("fp8_matrix_efficiency { from: 1 share: 1 }"),
                 "fp8_matrix_efficiency: found 1 as the least `from`, allowed: one that is 0");
  for (const char* share : {"0", "-0.5", "nan"})
    expect_refused(with(std::string("attention_efficiency: ") + share),
                   std::string("attention_efficiency: found ") + share + ", allowed: a number > 0");
  expect_refused(with("attention_efficiency: 1.5"),
                 "attention_efficiency: found 1.5, allowed: up to 1");
}

}  // namespace
}  // namespace lockstep
