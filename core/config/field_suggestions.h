#pragma once

// Internal.

#include <string>

namespace lockstep {

/// "unknown field 'modle.hidden_size'; did you mean 'model.hidden_size'?", for a path that the
/// schema lacks. Suggests fields of the same name in other groups, misspelled ones, and those whose
/// name contains the one given; if there are none, says what lists the fields.
std::string unknown_field(const std::string& path);

}  // namespace lockstep
