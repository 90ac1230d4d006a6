#pragma once

// Internal.

#include <cstdint>
#include <vector>

#include "lockstep/pipeline/schedule.h"

namespace lockstep {

/// A table over the tasks of one rank, which must exist.
template <class Value>
class TaskTable {
 public:
  TaskTable(const PipelineSchedule& schedule, Value initial)
      : microbatches_(schedule.microbatches),
        chunks_(schedule.chunks),
        values_(static_cast<size_t>(3 * chunks_ * microbatches_), initial) {}

  Value& operator[](const PipelineTask& task) {
    const int64_t row = static_cast<int64_t>(task.kind) * chunks_ + task.chunk;
    return values_[static_cast<size_t>(row * microbatches_ + task.microbatch)];
  }

 private:
  int64_t microbatches_;
  int64_t chunks_;
  std::vector<Value> values_;
};

}  // namespace lockstep
