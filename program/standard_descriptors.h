#pragma once

#include <string>

namespace lockstep {

/// Opens /dev/null on each of the descriptors 0 to 2 that is closed, so that no file of the run
/// gets its number. Writing to standard output still fails then, writing to standard error does
/// not. To be called before anything is opened.
void open_standard_descriptors();

/// Has std::cout keep the reason why it cannot be written, which a stream otherwise forgets. To be
/// called before anything is written.
void watch_standard_output();

/// Writes what std::cout still holds. FileError "standard output cannot be written: why", behind
/// `who` and a colon where that is given, also where it failed earlier.
void flush_standard_output(const std::string& who = "");

/// Whether standard output takes anything; false where it was closed when the program began.
bool standard_output_is_open();

}  // namespace lockstep
