#pragma once

// A signal that was ignored when the process started, as behind `nohup` or in a script's `&`, stays
// ignored.
namespace lockstep {

/// From now on a first SIGTERM does not end the process; it is noted.
void note_sigterm();

/// The same for SIGINT.
void note_sigint();

// A further one of these signals ends the process at once, unless it comes within a second of the
// first: launchers pass on what the terminal has sent to all processes already.

/// From now on these signals are ignored while nothing can be read from the socket `descriptor`:
/// the launcher tells a waiting process through it what to do, and sends it no signal before that.
void note_signals_only_beside(int descriptor);

/// From now on they are noted as before.
void note_all_signals();

/// The signal that was noted; 0: none.
int noted_signal();
void forget_noted_signal();

/// From now on the two are ignored: the run has ended, and its state is saved.
void ignore_signals();

/// From now on either ends the process at once with this status: it does something that may be
/// left undone.
void exit_on_signals(int status);

}  // namespace lockstep
