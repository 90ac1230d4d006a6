#pragma once

#include <string>

namespace lockstep {

/// Opens /dev/null on each of the descriptors 0 to 2 that is closed, so that no file of the run
/// gets its number. Writes to standard output still fail then, writes to standard error do not.
/// Call it before anything is opened.
void open_standard_descriptors();

/// Raises the soft limit of open files to the hard one: a rank has a connection to each rank of its
/// groups, rank 0 two more for each.
void allow_many_open_files();

/// Makes std::cout keep the reason why a write fails, which a stream otherwise forgets. Call it
/// before anything is written.
void watch_standard_output();

/// Flushes std::cout. FileError "standard output cannot be written: why", after `who` and a colon
/// if that is given, also if an earlier write failed.
void flush_standard_output(const std::string& who = "");

/// Whether standard output accepts anything; false if it was closed when the program began.
bool standard_output_is_open();

}  // namespace lockstep
