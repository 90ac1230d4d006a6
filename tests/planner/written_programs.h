#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>

#include "lockstep/parallel_state/job_program.h"
#include "lockstep/planner/machine.h"

/// Programs of ranks that a test writes by hand, and a machine with round numbers for them.
namespace lockstep::testing {

/// A byte of memory takes 1 s, a byte to another rank 2 s within a host and 3 s between hosts.
inline Machine machine_of(int64_t ranks_per_host, double latency = 0) {
  Machine machine;
  machine.ranks_per_host = ranks_per_host;
  machine.half_flops_per_s = 4;
  machine.wide_flops_per_s = 1;
  machine.memory_bytes_per_s = 1;
  machine.matrix = {{.from = 0, .share = 1}};
  machine.memory = {{.from = 0, .share = 1}};
  machine.inside_host = {.bytes_per_s = 1.0 / 2, .latency_s = latency};
  machine.between_hosts = {.bytes_per_s = 1.0 / 3, .latency_s = latency};
  return machine;
}

/// Writes the program of a rank.
class Writer {
 public:
  explicit Writer(int64_t rank) { program_.rank = rank; }

  uint32_t group(const std::string& name, RankList ranks) {
    const auto own = std::find(ranks.begin(), ranks.end(), program_.rank) - ranks.begin();
    program_.groups.push_back({name, /*apart=*/name, std::move(ranks), own});
    return static_cast<uint32_t>(program_.groups.size()) - 1;
  }
  void kernel(int64_t bytes, bool backward = true, double flops = 0) {
    program_.kernels.push_back({"kernel", "Float", flops, bytes, backward});
    add(ProgramEvent::Kind::kernel, program_.kernels.size() - 1);
  }
  uint32_t start(uint32_t group, const CollectiveOperation& operation, int64_t bytes,
                 bool on_device = true) {
    program_.calls.push_back({group, operation, "x", "Byte", bytes, bytes, on_device});
    add(ProgramEvent::Kind::start, program_.calls.size() - 1);
    return started_++;
  }
  void wait(uint32_t operation) { add(ProgramEvent::Kind::wait, operation); }
  void host_wait(uint32_t waits) { add(ProgramEvent::Kind::host_wait, waits); }
  void end_step() { program_.step_ends.push_back(program_.events.size()); }
  RankProgram take() { return std::move(program_); }

 private:
  void add(ProgramEvent::Kind kind, size_t value) {
    program_.events.push_back({kind, static_cast<uint32_t>(value)});
  }
  RankProgram program_;
  uint32_t started_ = 0;
};

/// Two equal steps of each rank.
inline JobProgram job_of(int64_t world, const std::function<void(int64_t rank, Writer&)>& connect,
                         const std::function<void(int64_t rank, Writer&)>& step) {
  JobProgram job;
  for (int64_t rank = 0; rank < world; ++rank) {
    Writer writer(rank);
    connect(rank, writer);
    for (int i = 0; i < 2; ++i) {
      step(rank, writer);
      writer.end_step();
    }
    job.programs.push_back(writer.take());
    job.program_of.push_back(static_cast<uint32_t>(rank));
  }
  return job;
}

}  // namespace lockstep::testing
