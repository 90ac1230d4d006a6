#pragma once

// Internal. No libtorch here.

#include <memory>

#include "lockstep/parallel_state/launch_environment.h"
#include "lockstep/parallel_state/secret.h"

namespace lockstep {

/// The secret of the job that this process belongs to: LOCKSTEP_SECRET, or the content of the file
/// LOCKSTEP_SECRET_FILE without one '\n' at its end; null where neither is set. ConfigError names
/// the variable, never the secret: both are set; it has fewer bytes than a secret needs; the file
/// cannot be read, is no file, is longer than 64 KiB, or others than its owner may read it.
std::shared_ptr<const Secret> read_job_secret(const EnvironmentReader& read);

/// The same, from the environment of this process.
std::shared_ptr<const Secret> read_job_secret();

/// Gives this process and those that it starts a random secret, unless the environment has one.
/// `keeps_file`: where it has a file, its content takes the place of its name, so that a process
/// that starts later has the secret even if the file has gone. A file that is no usable secret, or
/// has a zero byte, which a variable cannot hold, stays for those processes to read.
void give_job_secret(bool keeps_file);

/// "of LOCKSTEP_SECRET", "of LOCKSTEP_SECRET_FILE", "none", for messages. Reads no file.
const char* job_secret_source(const EnvironmentReader& read);

}  // namespace lockstep
