#pragma once

#include <memory>

#include <c10/core/Device.h>

#include "lockstep/parallel_state/backends.h"
#include "lockstep/tests/support/device/nccl_rules.h"

namespace lockstep::testing {

/// A c10d backend for tensors of the lagging device, whose ranks are threads of one process and
/// which follows the rules of libtorch 2.11's ProcessGroupNCCL over NCCL 2.28. Sums have the bits
/// of the host transport. The rules:
///
/// - **Streams.** A call makes the communicator's stream wait for the current one, queues a kernel
///   there and returns. wait() makes the current stream wait for the kernel; the host goes on. Only
///   a barrier's wait(), and one with a timeout, blocks the host. Tensors of collectives are kept
///   until wait(); those of messages are recorded with the stream.
/// - **Kernels** spin until the kernels of all members run, see NcclCommunicator. Members that
///   call other collectives, or with other sizes or roots, spin until they are aborted; with
///   another dtype or reduction of the same size they get wrong numbers. A collective of no bytes
///   launches nothing.
/// - **Communicators** are made by the first call, which blocks the host until all members have
///   come: of the group by collectives and by messages in a batch, of the pair by other messages.
///   The first use of each direction of a pair blocks the host again, until the other end is used.
///   A member waits one timeout for the first of them, then throws; for the others, forever, and
///   abort() does not release it.
/// - **Messages** ignore their tag. Those of a pair share one stream, in both directions, so two
///   ranks that both send first never get to receive.
/// - **Batches**, startCoalescing() to endCoalescing(), are one kernel. The works that the calls
///   within return are worthless, and a message's tensor has to live until endCoalescing().
/// - **Eager mode**, after eagerConnectSingleDevice(): messages use the group's communicator and so
///   its one stream, in turn with the collectives.
/// - **The end.** shutdown() waits for this rank's kernels. abort(), or destruction without either,
///   releases them, with their outputs as they are; the other members spin on. Afterwards calls
///   throw.
/// - **The watchdog** ends the process when a work has not ended within the timeout after its
///   launch: see NcclRules::on_timeout.
/// - **Graphs.** In the capture of a graph a call is recorded, and counted at each replay; the
///   works end with the capture, and no watchdog looks at a replay. Within a communicator a
///   replay's kernels and others have the order of their launches, whatever their streams. Making
///   a communicator, the first use of a direction and what blocks the host are errors in a capture.
///   shutdown() while a graph with collectives lives, for which NCCL waits forever, is an error.
/// - **Refused**: tensors on the CPU or another device, not contiguous, of dtypes that NCCL lacks
///   (int16), averages of bool. Stricter than c10d: a scaled sum (PREMUL_SUM) of bf16, and messages
///   that are not contiguous, are errors and not wrong numbers.
///
/// Left out: NCCL's buffers, which let a small message leave before its receiver comes; connecting
/// the algorithms of collectives at their first use; splitting and shrinking groups.
///
/// `rules` is what the backends of a job share; unset: one that nobody sees.
c10::intrusive_ptr<c10d::Backend> make_nccl_rules_backend(const BackendSpec& spec,
                                                          c10::Device device,
                                                          std::shared_ptr<NcclRules> rules = {});

}  // namespace lockstep::testing
