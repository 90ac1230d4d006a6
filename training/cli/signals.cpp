#include "lockstep/training/cli/signals.h"

#include <csignal>

namespace lockstep {
namespace {

volatile std::sig_atomic_t noted = 0;

extern "C" void on_sigterm(int) { noted = 1; }

}  // namespace

void note_sigterm() { std::signal(SIGTERM, on_sigterm); }

bool sigterm_noted() { return noted != 0; }

}  // namespace lockstep
