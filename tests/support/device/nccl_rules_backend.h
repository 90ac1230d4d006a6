#pragma once

#include <memory>

#include <c10/core/Device.h>

#include "lockstep/parallel_state/backends.h"
#include "lockstep/tests/support/device/nccl_rules.h"

namespace lockstep::testing {

/// A c10d backend for tensors of the lagging device. Its ranks are threads of one process, and it
/// follows the rules of libtorch 2.11's ProcessGroupNCCL over NCCL 2.28. Sums have the bits of the
/// host transport. The rules:
///
/// - **Streams.** A call makes the communicator's stream wait for the current one, queues a kernel
///   there and returns. wait() makes the current stream wait for the kernel and does not block the
///   host, except for a barrier or with a timeout. Tensors of collectives are kept until wait();
///   tensors of messages are recorded on the stream.
/// - **Kernels** spin until the kernels of all members run, see NcclCommunicator. If members call
///   different collectives, or the same with different sizes or roots, they spin until they are
///   aborted. With another dtype or reduction of the same size they get wrong numbers. A collective
///   of zero bytes launches nothing.
/// - **Communicators** are created by the first call, which blocks the host until all members have
///   arrived. Collectives and batched messages create the group's communicator, other messages that
///   of the pair. The first use of each direction of a pair blocks the host again, until the other
///   end is used. A member waits for the first member for one timeout, then throws. It waits for
///   the others forever, and abort() does not release it.
/// - **Messages** ignore their tag. The messages of a pair share one stream, in both directions, so
///   two ranks that both send first never get to receive.
/// - **Batches**, from startCoalescing() to endCoalescing(), are one kernel. The works that calls
///   in a batch return are worthless, and a message's tensor has to live until endCoalescing().
/// - **Eager mode**, after eagerConnectSingleDevice(): messages use the group's communicator, and
///   so take turns with the collectives on its one stream.
/// - **The end.** shutdown() waits for this rank's kernels. abort(), or destruction without either,
///   releases them and leaves their outputs as they are; the other members keep spinning. abort()
///   then waits until no kernel of this rank is left on the device, also of other groups, and until
///   all graphs with its collectives are gone. Later calls throw.
/// - **The watchdog** ends the process if a work has not ended within the timeout after its launch:
///   see NcclRules::on_timeout.
/// - **Graphs.** In a graph capture, a call is recorded and then counted at each replay; its works
///   end with the capture, and no watchdog checks a replay. Within a communicator, all kernels,
///   replayed or not, run in the order of their launches, whatever their streams. Creating a
///   communicator, the first use of a direction, and whatever blocks the host are errors in a
///   capture. shutdown() while a graph with collectives lives, for which NCCL waits forever, is an
///   error.
/// - **Refused**: tensors on the CPU or another device, non-contiguous tensors, dtypes that NCCL
///   lacks (int16), averages of bool. Stricter than c10d: a scaled sum (PREMUL_SUM) of bf16, and
///   non-contiguous messages, are errors here and not wrong numbers.
///
/// Not modelled: NCCL's buffers, which let a small message leave before its receiver arrives;
/// connecting the algorithms of collectives at their first use; splitting and shrinking groups.
///
/// The backends of a job share `rules`; if unset, the backend has its own.
c10::intrusive_ptr<c10d::Backend> make_nccl_rules_backend(const BackendSpec& spec,
                                                          c10::Device device,
                                                          std::shared_ptr<NcclRules> rules = {});

}  // namespace lockstep::testing
