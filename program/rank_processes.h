#pragma once

#include "lockstep/program/rank_process.h"

/// The starter of `lockstep launch` for one host. Nothing here needs libtorch.
namespace lockstep {

/// Starts `ranks` processes and returns when the last one has ended. Each has torchrun's variables
/// RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, TORCHELASTIC_RUN_ID
/// and TORCHELASTIC_RESTART_COUNT; rank 0 serves the store. Their input and output are those of
/// this process.
///
/// SIGTERM, SIGINT and SIGHUP are passed on to every rank, unless this process ignored them before;
/// stopped ranks continue so that they see them. If a rank fails, standard error says which and
/// how, and the others get SIGTERM, ten seconds later SIGKILL. Ranks that exit with 0, 3 (stopped,
/// state saved) or 4 (diverged) have not failed: all ranks of a run end in this way, so the others
/// are waited for. If this process is killed, the system kills the ranks.
///
/// After a failure all ranks are started again once the last one has ended, at most `max_restarts`
/// times: with the same LOCKSTEP_JOB_ID, the next TORCHELASTIC_RESTART_COUNT and another free port.
/// There is no restart after a signal to this process, nor once a rank has ended with 3 or 4, nor
/// if the rank exited with 2: a configuration that was refused stays refused.
///
/// With `elastic` the other ranks stay (see launch_channel.h): they leave their round, report that
/// and wait. A rank that does not report it within its own timeout plus 15 s, or that stays stopped
/// by a signal for 2 s while all others wait or have ended, is killed and also counts as lost. A
/// lost spare does not count. Then a process takes the place of each lost rank, which is one
/// restart; one that the system does not start is lost at once. If no restart is left, the
/// remaining ranks go on alone, as many as the configuration fits; the others wait as spares, take
/// part again after a further loss, and end with the run. If no number of ranks fits, or none is
/// lost and no restart is left, all end with status 1. After a first SIGTERM or SIGINT to this
/// process, a rank that a signal kills, even before it handled signals itself, ends the others with
/// status 3. Once a rank has ended with 3 or 4, a loss changes nothing: there is no restart, and
/// that is the status. Each process keeps its slot (see kSlotVariable), which picks its device; no
/// other that runs has the same.
///
/// `spares` processes (see LaunchChannel::spare_of()) start with the ranks and wait for losses. If
/// at least as many wait as ranks are lost, they take those places, which is no restart. Ten
/// seconds later new processes become the next spares, which is one restart, if any is left and no
/// signal has told this process to end. A spare that the system does not start is missing until the
/// next new processes start. A spare that is still starting is waited for after a loss only if no
/// restart is left, and is killed when the run ends.
///
/// Returns, for the last start, the exit status of the first rank that failed, 1 if a signal killed
/// it; otherwise the first status that is not 0; otherwise 0. CommunicationError if no port is
/// free, UsageError if the system does not start a rank and none is there that could go on.
int run_rank_processes(const LaunchedProgram& program);

}  // namespace lockstep
