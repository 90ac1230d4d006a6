#pragma once

#include <cstddef>
#include <string>

namespace lockstep {

/// Notes a file that is mapped into memory, so that a fault in it can be told with its name. The
/// 64 that came first are noted; `path` must live until forget_mapping().
void note_mapping(const void* begin, size_t bytes, const std::string& path);
void forget_mapping(const void* begin);

/// From now on the process ends with status 1, and says on standard error which file it was and at
/// which byte, where a mapped file that was noted has become shorter than it was, or its disk
/// cannot give what is read. Any other SIGBUS ends the process as before. For programs: a library
/// leaves the signals of its process alone.
void tell_faults_of_mapped_files();

}  // namespace lockstep
