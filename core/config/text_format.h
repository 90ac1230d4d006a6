#pragma once

// Internal.

#include <google/protobuf/message.h>

#include <string>

namespace lockstep {

/// "model.num_layers" for a field of one of the messages inside proto::Config.
std::string path_of(const google::protobuf::FieldDescriptor& field);

/// Parses `text` in protobuf's text format into `message`, which is cleared first. ConfigError
/// "origin:line:column: ..." for the first error, with the field if its value is wrong.
void parse_text(const std::string& text, const std::string& origin,
                google::protobuf::Message* message);

}  // namespace lockstep
