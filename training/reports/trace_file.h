#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>

namespace lockstep {

/// The description of a trace of `lockstep train --profile` in the trace itself.
struct TraceHeader {
  int64_t rank = 0;
  int64_t world_size = 0;
  int64_t process = 0;  ///< its id, which the events of the host carry
  std::string host;     ///< ranks of one host read one clock
  int64_t base_ns = 0;  ///< since 1970; the events' times count from it, in microseconds
};

/// Reads a trace in the Chrome format event by event, so that its size does not matter: `event` is
/// called with each event and may move from it. FileError: the file cannot be read, is not JSON, or
/// was not written by a rank of this program.
TraceHeader read_trace(const std::string& path, const std::function<void(nlohmann::json&)>& event);

/// The source of the header: a JSON object that a rank puts into its trace under kTraceHeaderKey.
std::string trace_header_json(const TraceHeader& header);
inline constexpr char kTraceHeaderKey[] = "lockstep";

}  // namespace lockstep
