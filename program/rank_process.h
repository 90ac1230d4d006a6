#pragma once

#include <sys/types.h>

#include <memory>
#include <string>
#include <vector>

#include "lockstep/parallel_state/launch_channel.h"
#include "lockstep/program/blocked_signals.h"

namespace lockstep {

/// A program and how often it runs.
struct LaunchedProgram {
  std::string file;                    ///< a path, or a name on PATH
  std::vector<std::string> arguments;  ///< without the program's own name
  int ranks = 1;
  int spares = 0;  ///< further processes, which wait until ranks are lost; see run_rank_processes()
  std::string master_address = "127.0.0.1";
  int master_port = 0;  ///< 0: a free one, reserved while the ranks run
  int max_restarts = 0;
  bool elastic = false;  ///< remaining ranks stay; see run_rank_processes()
};

/// If the file cannot be executed, prints the message that rank `first_rank` would print, and
/// throws ExitStatus. A script whose interpreter is missing is not noticed.
void check_program(const LaunchedProgram& program, int first_rank);

/// A port that no other process gets while this object lives. Rank 0 can still listen on it,
/// because both sockets have SO_REUSEADDR and this one does not listen.
class ReservedPort {
 public:
  /// CommunicationError: none is free there.
  explicit ReservedPort(const std::string& address);
  ~ReservedPort();
  ReservedPort(const ReservedPort&) = delete;
  ReservedPort& operator=(const ReservedPort&) = delete;

  int number() const;

 private:
  int socket_;
};

/// One start of the ranks, or one round of the remaining ones.
struct RankRound {
  int ranks = 1;
  int master_port = 0;
  int number = 0;    ///< 0 for the first
  int spare_of = 0;  ///< not 0: the rank waits as a spare of that many ranks, which meet without it
};

/// torchrun's variables for rank `rank` of a round; for a spare LOCKSTEP_SPARE_OF, too.
VariableList variables_of_rank(const LaunchedProgram& program, const RankRound& round, int rank);

/// Starts a process as rank `rank`, with `channel` and `slot` (see kSlotVariable) unless `channel`
/// is null; returns its id, or -1 and an errno. The rank ends with this process.
pid_t start_rank(const LaunchedProgram& program, const RankRound& round, int rank, int slot,
                 const BlockedSignals& signals, const RankChannel* channel);

/// "the newest complete checkpoint is 'runs/checkpoint/step_8'", of those in `folder`; "no
/// checkpoint has been saved" if there is none, or `folder` is empty.
std::string newest_checkpoint_in(const std::string& folder);

/// "exited with status 1", "was killed by signal 9 (Killed)": for a status of waitpid().
std::string end_of_process(int status);

}  // namespace lockstep
