#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include <c10/core/Device.h>

/// An asynchronous device for tests, on libtorch's PrivateUse1. It computes with the CPU's kernels
/// on memory of the same layout, so every result has the CPU's bits, but late. An operator
/// determines its shapes at once and is queued on the current stream of its tensors' device. A
/// stream is a thread that runs its tasks in order and delays some of them. Errors that only an
/// asynchronous device reveals therefore show up here:
///
///   - Fresh and freed memory holds 0xFF in every byte (NaN, -1). A freed block goes at once to the
///     next allocation on the stream that it was allocated on. Another stream that still uses the
///     block finds poison, unless the stream was recorded for the tensor (record_stream).
///   - A host that reads memory (host_view, pinned memory) without waiting finds poison or old
///     values.
///   - Streams run concurrently. Only events order them.
///   - Whatever makes the host wait on CUDA makes it wait here and is counted: reading an element,
///     data-dependent shapes, copies from pageable memory and to the host, synchronize().
///   - Operands on another device, CPU operands with dimensions, and dtypes that CUDA's kernel of
///     an operator lacks are errors. Operators without tensors run on the thread's current device.
///   - An exception in a queued kernel becomes the device's error. Later kernels do not run, and
///     every wait on the device throws it.
///   - Launches can be captured in a graph (kernels/device_graph.h) and replayed, by CUDA's rules.
///     They are recorded and not run. A stream joins when it waits for an event of the capture, and
///     must be waited for before the end. These are errors and make the capture invalid: using the
///     default stream, a wait of the host or a query whether it would have to wait, a wait for work
///     that was launched outside, random numbers. Memory that is allocated in a capture belongs to
///     the graph until the graph is destroyed. The graph knows other memory by address only: once
///     it is freed, replays find poison. In a replay, the work of the other streams runs on streams
///     of its own, after the work that the current stream has, and the current stream waits for it.
///   - autograd runs backward on one thread per device, with the streams of forward.
///
/// Not supported: sparse and quantized tensors, complex conjugation without a copy.
namespace lockstep::testing {

struct LaggingDeviceOptions {
  int devices = 16;   ///< 1 to 32; fixed by the first call in the process
  uint64_t seed = 1;  ///< of the delays
  /// Maximum length of a delay. It ends early when the host waits for the stream, or for a stream
  /// that waits for it. If every task has a long delay, a stream does nothing until somebody waits
  /// for it.
  std::chrono::microseconds longest_delay{100};
  double delayed = 0.1;  ///< share of the tasks that are delayed
  /// If set, the first launch of an operator on a device waits until all streams of the device are
  /// idle, as loading a CUDA kernel may. This is not counted as a wait. It does not apply to NCCL's
  /// kernels, which are loaded when a communicator is created.
  bool loads_kernels = false;
};

/// The first call in the process registers the device as "lagging". It must come before the
/// process's first backward. Later calls set seed and delays; they may ask for fewer devices, but
/// not for more (UsageError).
void use_lagging_device(const LaggingDeviceOptions& options = {});

/// Throws UsageError unless `index` is one of the devices.
c10::Device lagging_device(int index);

struct DeviceCounts {
  int64_t launches = 0;  ///< operators, copies, enqueue(); a replay of a graph counts once
  int64_t replays = 0;
  int64_t waits = 0;  ///< of the host for this device
  /// Waits by cause: the operator ("aten::nonzero"), "copy to host", "copy from pageable memory",
  /// "copy from pinned memory", "synchronize stream", "synchronize event", "synchronize event
  /// elsewhere" (see DeviceEvent), "synchronize device".
  std::map<std::string, int64_t> waits_by = {};
};

/// Counts since `before`.
DeviceCounts operator-(DeviceCounts after, const DeviceCounts& before);

DeviceCounts device_counts(int index);
/// Resets the counts of all devices.
void reset_device_counts();

/// The first error of a task of the device.
std::optional<std::string> device_error(int index);
/// Clears the errors of all devices once their streams are idle. Work that an error kept from
/// running is lost.
void clear_device_errors();

}  // namespace lockstep::testing
