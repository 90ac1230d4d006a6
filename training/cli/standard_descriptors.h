#pragma once

namespace lockstep {

/// Opens /dev/null on each of the descriptors 0 to 2 that is closed, so that no file of the run
/// gets its number. Writing to standard output still fails then, writing to standard error does
/// not. To be called before anything is opened.
void open_standard_descriptors();

/// Whether standard output takes anything; false where it was closed when the program began.
bool standard_output_is_open();

}  // namespace lockstep
