#include "lockstep/parallel_state/flight_recorder.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include <torch/csrc/distributed/c10d/FlightRecorder.hpp>

namespace lockstep {

std::string dump_flight_recorder(int64_t rank) noexcept try {
  const char* const size = std::getenv("TORCH_FR_BUFFER_SIZE");
  if (size && std::string(size) == "0") return "";
  const std::string recording =
      c10d::dump_fr_trace_json(/*includeCollectives=*/true, /*onlyActive=*/false);
  if (recording.find("\"entries\"") == std::string::npos) return "";
  const char* const prefix = std::getenv("TORCH_FR_DUMP_TEMP_FILE");
  const std::string name = "lockstep_flight_recorder_rank_" + std::to_string(rank) + ".json";
  const std::string path = prefix ? prefix + std::to_string(rank)
                                  : (std::filesystem::temp_directory_path() / name).string();
  std::ofstream file(path, std::ios::binary);
  file << recording << "\n";
  if (file.flush()) return path;
  std::error_code ignored;
  std::filesystem::remove(path, ignored);
  return "";
} catch (const std::exception&) {
  return "";
}

}  // namespace lockstep
