#pragma once

// Internal: device launches that are recorded once and replayed as a whole.

#include <functional>
#include <memory>

#include <c10/core/Device.h>

namespace lockstep::kernels {

/// A recording of what was launched on a device, such as a CUDA graph.
///
/// Between begin_capture() and end_capture() nothing runs: what is launched on the current stream,
/// and on streams that wait for it, is recorded. Memory that is allocated there belongs to the
/// recording until it is destroyed, and a tensor made there has its values only after replay().
/// Reading such a tensor on the host, copying from pageable memory, and waiting for what was
/// launched before the capture are errors. Streams that were forked from the current stream during
/// the recording must have joined it again by the end.
class DeviceGraph {
 public:
  virtual ~DeviceGraph() = default;

  /// The current stream must not be the device's default stream, and the device must be idle.
  virtual void begin_capture() = 0;
  virtual void end_capture() = 0;

  /// Launches the recording on the current stream, any number of times. Addresses are those of the
  /// capture: write inputs to where they were then.
  virtual void replay() = 0;
};

using MakeDeviceGraph = std::function<std::unique_ptr<DeviceGraph>()>;

bool has_device_graphs(c10::DeviceType type);

/// UsageError if devices of `type` have no graphs.
std::unique_ptr<DeviceGraph> make_device_graph(c10::DeviceType type);

/// Registers graphs for a device type other than CUDA, before its first use.
void register_device_graphs(c10::DeviceType type, MakeDeviceGraph make);

/// CUDA's; empty if CUDA is not loaded, see cuda_libraries.h.
MakeDeviceGraph cuda_graphs();

}  // namespace lockstep::kernels
