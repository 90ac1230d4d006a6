#pragma once

#include <cstdint>
#include <string>
#include <vector>

/// Which rank writes what of a checkpoint: integer arithmetic, without libtorch.
namespace lockstep {

/// Something that one rank is to write, and the ranks that hold it.
struct SaveUnit {
  std::string key;
  int64_t bytes = 0;
  std::vector<int64_t> holders;  ///< ranks, ascending, at least one
};

/// The rank that writes each unit, one of its holders. Units are assigned in order: the fewest
/// holders first, then the largest first, then by key. Each goes to the holder that has the fewest
/// bytes to write so far; among equals, the lowest rank. The same on all ranks. This is how
/// Megatron Core's fully parallel save does it.
std::vector<int64_t> assign_writers(const std::vector<SaveUnit>& units, int64_t world_size);

/// What one rank holds.
struct HeldUnit {
  std::string key;
  int64_t bytes = 0;
  bool on_one_stage = false;  ///< no other pipeline stage has it
};

/// The units of all ranks, from what each holds; `held[rank]` lists them.
std::vector<SaveUnit> merge_units(const std::vector<std::vector<HeldUnit>>& held);

/// UsageError, naming the key and the ranks, if a unit that is on_one_stage is on another stage,
/// too, or twice on one rank. `stages[rank]` is the pipeline stage of a rank.
void check_stages(const std::vector<std::vector<HeldUnit>>& held,
                  const std::vector<int64_t>& stages);

/// The units without those that duplicate what others hold. Ranks that hold copies of a tensor may
/// cut it into ranges at different places (keys that end in "#first:last", see shard_entry_name());
/// of these, ranges that follow each other without overlap stay. Units in which no overlap is found
/// stay as they are.
std::vector<SaveUnit> without_overlaps(const std::vector<SaveUnit>& units);

/// What a rank holds, to a text and back. FileError if the text is not valid.
std::string format_held_units(const std::vector<HeldUnit>& units);
std::vector<HeldUnit> parse_held_units(const std::string& text);

}  // namespace lockstep
