#pragma once

// Internal. No libtorch here.

#include <memory>

#include "lockstep/parallel_state/launch_environment.h"
#include "lockstep/parallel_state/secret.h"

namespace lockstep {

/// The secret of the job that this process belongs to: LOCKSTEP_SECRET, or the content of the file
/// LOCKSTEP_SECRET_FILE without one '\n' at its end; null if neither is set. ConfigError names the
/// variable, never the secret: both are set; it has fewer bytes than a secret needs; the file
/// cannot be read, is not a regular file, is longer than 64 KiB, or can be read by users other than
/// its owner.
std::shared_ptr<const Secret> read_job_secret(const EnvironmentReader& read);

/// The same, from the environment of this process.
std::shared_ptr<const Secret> read_job_secret();

/// Gives this process and the processes that it starts a random secret, unless the environment has
/// one. `keeps_file`: if the environment names a file, its content replaces its name, so that a
/// process that starts later has the secret even if the file is gone. If the file is not a usable
/// secret, or has a zero byte, which a variable cannot hold, its name stays, and those processes
/// read it.
void give_job_secret(bool keeps_file);

/// "of LOCKSTEP_SECRET", "of LOCKSTEP_SECRET_FILE", "none", for messages. Reads no file.
const char* job_secret_source(const EnvironmentReader& read);

}  // namespace lockstep
