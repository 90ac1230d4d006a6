#include "lockstep/training/trace_file.h"

#include <nlohmann/json.hpp>

#include "lockstep/core/check.h"
#include "lockstep/datasets/file_bytes.h"
#include "lockstep/datasets/json_field.h"

namespace lockstep {

using Json = nlohmann::json;

TraceHeader read_trace(const std::string& path, const std::function<void(Json&)>& event) {
  const FileBytes file(path);
  bool in_events = false;
  const auto on_value = [&](int depth, Json::parse_event_t kind, Json& parsed) {
    if (depth == 1 && kind == Json::parse_event_t::key) in_events = parsed == "traceEvents";
    if (depth != 2 || !in_events || kind != Json::parse_event_t::object_end) return true;
    event(parsed);
    return false;
  };
  try {
    const Json rest = Json::parse(file.bytes(), on_value);
    const Json& header = rest.at(kTraceHeaderKey);
    const auto integer = [&](const Json& of, const char* key) {
      const Json& value = of.at(key);
      require<FileError>(is_int64(value), "'{}': '{}': found {}, allowed: a whole number", path,
                         key, value.dump());
      return value.get<int64_t>();
    };
    constexpr char kBase[] = "baseTimeNanoseconds";
    return {integer(header, "rank"), integer(header, "world_size"), integer(header, "process"),
            header.at("host"), rest.contains(kBase) ? integer(rest, kBase) : 0};
  } catch (const Json::exception& error) {
    fail<FileError>("'{}': found {}, allowed: a trace that `lockstep train --profile` wrote", path,
                    problem_of(error));
  }
}

std::string trace_header_json(const TraceHeader& header) {
  return Json({{"rank", header.rank},
               {"world_size", header.world_size},
               {"process", header.process},
               {"host", header.host}})
      .dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace lockstep
