#include <iostream>

#include "lockstep/checkpoint/checkpoint_folder.h"
#include "lockstep/program/commands.h"

namespace lockstep {

void print_note(const std::string& note) {
  if (!note.empty()) std::cerr << "lockstep: " + note + "\n" << std::flush;
}

void note_doubt(const std::string& checkpoints) { print_note(doubt_about_newest(checkpoints)); }

}  // namespace lockstep
