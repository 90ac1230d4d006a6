#pragma once

#include <string>

namespace lockstep {

/// Something that must be the same on all ranks of a job.
struct AnnouncedField {
  std::string name;   ///< for messages, such as the path of a configuration field
  std::string value;  ///< without zero bytes, like the name
};

}  // namespace lockstep
