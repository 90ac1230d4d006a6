#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include <c10/core/Device.h>

/// An asynchronous device for tests, on libtorch's PrivateUse1. It computes with the CPU's kernels
/// on memory of the same layout, so that every result has the CPU's bits, but late: an operator
/// takes its shapes at once and is queued on the current stream of its tensors' device, a thread
/// that runs its tasks in order and delays some. What only an asynchronous device shows therefore
/// shows here:
///
///   - Fresh and freed memory holds 0xFF in every byte (NaN, -1). A freed block goes at once to the
///     next allocation on the stream that it was allocated on; work that another stream still has
///     with it finds poison, unless the tensor was told of that stream (record_stream).
///   - A host that reads memory (host_view, pinned memory) without waiting finds poison or old
///     values.
///   - Streams run side by side. Only events order them.
///   - What makes the host wait on CUDA makes it wait here and is counted: the value of an element,
///     shapes that depend on data, copies from pageable memory and to the host, synchronize().
///   - Operands on another device, CPU operands with dimensions, and dtypes that CUDA's kernel of
///     an operator lacks are errors. Operators without tensors run on the thread's current device.
///   - An exception of a queued kernel becomes the device's error. The kernels behind it do not
///     run, and every wait on the device throws it.
///   - Launches can be captured in a graph (kernels/device_graph.h) and replayed, by CUDA's rules:
///     they are recorded and not run; a stream joins when it waits for an event of the capture, and
///     must be waited for before the end. An error, which makes the capture invalid: the default
///     stream, a wait of the host or a question whether it would have to wait, a wait for what was
///     launched outside, random numbers. Memory that is allocated in a capture is the graph's until
///     the graph is destroyed. Other memory it has by address only: when it is freed, replays find
///     poison. A replay puts the other streams' part on streams of its own, behind what the current
///     stream has to do, and the current stream waits for it.
///   - autograd runs backward on one thread per device, with the streams of forward.
///
/// Not there: sparse and quantized tensors, complex conjugation without a copy.
namespace lockstep::testing {

struct LaggingDeviceOptions {
  int devices = 16;   ///< 1 to 32; the first call in the process fixes it
  uint64_t seed = 1;  ///< of the delays
  /// A delay ends when the host waits for the stream, or for one that waits for it: with long
  /// delays of every task a stream does nothing before somebody waits for it.
  std::chrono::microseconds longest_delay{100};
  double delayed = 0.1;  ///< share of the tasks that are delayed
  /// The first launch of an operator on a device waits until all streams of the device have done
  /// what they have, as loading a CUDA kernel may. Not counted as a wait; not for NCCL's kernels,
  /// which are loaded when a communicator is made.
  bool loads_kernels = false;
};

/// Registers the device, as "lagging", in the process's first call, which must come before its
/// first backward. Later calls set seed and delays; they may ask for fewer devices, not for more
/// (UsageError).
void use_lagging_device(const LaggingDeviceOptions& options = {});

/// UsageError unless `index` is one of the devices.
c10::Device lagging_device(int index);

struct DeviceCounts {
  int64_t launches = 0;  ///< operators, copies, enqueue(); of a replay the whole graph is one
  int64_t replays = 0;
  int64_t waits = 0;  ///< of the host for this device
  /// By cause: the operator ("aten::nonzero"), "copy to host", "copy from pageable memory", "copy
  /// from pinned memory", "synchronize stream", "synchronize event", "synchronize device".
  std::map<std::string, int64_t> waits_by = {};
};

/// What has come since `before`.
DeviceCounts operator-(DeviceCounts after, const DeviceCounts& before);

DeviceCounts device_counts(int index);
/// Of all devices.
void reset_device_counts();

/// The first error that a task of the device met.
std::optional<std::string> device_error(int index);
/// Of all devices, when their streams have come to rest. The work that an error kept from running
/// is lost.
void clear_device_errors();

}  // namespace lockstep::testing
