#pragma once

// Internal. No libtorch here.

#include <cstdint>
#include <string>

namespace lockstep {

/// Distinguishes hosts, their boots and their process id namespaces; 0 if the system does not
/// provide that.
uint64_t process_namespace();

/// Identifies this process among all that ever ran on its host: namespace, id and start time. Empty
/// if the system does not provide these.
std::string process_mark();

/// Whether the process with that mark is known to have ended. False for a process of another host,
/// for an empty mark, and if the system does not say (for example without a free descriptor).
bool process_has_ended(const std::string& mark);

/// Whether the process with that mark is known to be stopped by a signal.
bool process_has_stopped(const std::string& mark);

}  // namespace lockstep
