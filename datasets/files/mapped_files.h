#pragma once

#include <cstddef>
#include <string>

namespace lockstep {

/// Notes a file that is mapped into memory, so that a fault in it can be reported with its name.
/// Only the first 64 are noted; `path` must live until forget_mapping().
void note_mapping(const void* begin, size_t bytes, const std::string& path);
void forget_mapping(const void* begin);

/// From now on, if a noted mapped file has become shorter, or its disk cannot deliver what is read,
/// the process ends with status 1 and reports the file and the byte on standard error. Any other
/// SIGBUS ends the process as before. For programs only: a library should leave the signals of its
/// process alone.
void tell_faults_of_mapped_files();

}  // namespace lockstep
