#pragma once

namespace lockstep {

/// From now on SIGTERM does not end the process; it is noted.
void note_sigterm();

/// Whether SIGTERM has come.
bool sigterm_noted();

}  // namespace lockstep
