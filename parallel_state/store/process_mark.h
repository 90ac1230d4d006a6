#pragma once

// Internal. No libtorch here.

#include <cstdint>
#include <string>

namespace lockstep {

/// Tells hosts, their boots and namespaces of process ids apart; 0 if the system does not.
uint64_t process_namespace();

/// Names this process among all that ever ran on its host: namespace, id and time of its start.
/// Empty if the system does not tell.
std::string process_mark();

/// Whether the process of that mark is known to have ended. One of another host, or of no mark, is
/// not.
bool process_has_ended(const std::string& mark);

/// Whether the process of that mark is known to stand still: a signal has stopped it.
bool process_has_stopped(const std::string& mark);

}  // namespace lockstep
