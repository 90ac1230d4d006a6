#pragma once

// Internal.

#include <cstdint>
#include <string>

namespace lockstep {

/// Writes what c10d's flight recorder holds for this process to a JSON file and returns its path:
/// TORCH_FR_DUMP_TEMP_FILE followed by the rank, otherwise lockstep_flight_recorder_rank_R.json in
/// the folder for temporary files. Returns an empty text if the recorder is off
/// (TORCH_FR_BUFFER_SIZE is 0), has recorded nothing, or the file cannot be written. Never throws.
std::string dump_flight_recorder(int64_t rank) noexcept;

}  // namespace lockstep
